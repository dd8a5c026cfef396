#include "file/catalog.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <span>

#include "base/errors.h"
#include "base/machine.h"
#include "base/turns.h"
#include "comm/agree.h"
#include "comm/wire.h"
#include "file/layout.h"
#include "file/members.h"
#include "file/raw.h"

namespace shardow::file {
namespace {

using base::fail;
using base::Path;
using comm::Receiver;
using comm::Sender;

using Checksum = std::pair<std::string, uint32_t>;

std::string_view name_of(const Checksum& one) {
  return one.first;
}

std::string_view name_of(const Stored& one) {
  return one.entry.name;
}

/// By names. Of one name the first stays.
template <class T>
void order(std::vector<T>& all) {
  const auto before = [](const T& a, const T& b) { return name_of(a) < name_of(b); };
  const auto not_before = [&](const T& a, const T& b) { return !before(a, b); };
  if (std::adjacent_find(all.begin(), all.end(), not_before) == all.end()) return;  // as most stand
  std::stable_sort(all.begin(), all.end(), before);
  const auto same = [](const T& a, const T& b) { return name_of(a) == name_of(b); };
  all.erase(std::unique(all.begin(), all.end(), same), all.end());
}

/// The one of a name, null where there is none.
template <class T>
const T* find_in(const std::vector<T>& ordered, std::string_view name) {
  const auto at = std::lower_bound(ordered.begin(), ordered.end(), name,
                                   [](const T& a, std::string_view b) { return name_of(a) < b; });
  return at == ordered.end() || name_of(*at) != name ? nullptr : &*at;
}

std::vector<Checksum> checksums_in(const Metadata& metadata, const std::string& where) {
  std::vector<Checksum> found;
  const auto text = metadata.find(kChecksums);
  if (text == metadata.end()) return found;
  constexpr size_t kDigits = 10;  // with their quotes
  Members members(text->second, 1);
  while (members.next()) {
    const std::string_view value = members.text();
    uint32_t crc = 0;
    const bool is_text = value.size() == kDigits && value.front() == '"' && value.back() == '"';
    if (!is_text || std::from_chars(value.data() + 1, value.data() + 9, crc, 16).ptr != value.data() + 9)
      fail(Code::kCorrupt, "{}: the checksum of '{}' is not 8 hexadecimal digits", where, members.key());
    found.emplace_back(members.key(), crc);
  }
  if (!members.error().empty())
    fail(Code::kCorrupt, "{}: {} is no JSON object: {}", where, kChecksums, members.error());
  order(found);
  return found;
}

/// Of files [begin, end).
Catalog to_catalog(const Raw& raw, const std::string& path, size_t begin, size_t end) {
  Catalog catalog;
  catalog.path = path;
  std::vector<Stored> tensors;
  for (size_t f = begin; f < end; ++f) {
    const Raw::Text& file = raw.files[f];
    Header header = parse_header(file.json, file.data_bytes, file.path);
    const std::vector<Checksum> crcs = checksums_in(header.metadata, file.path);
    header.metadata.erase(kChecksums);
    const auto written_by = header.metadata.extract(kWrittenBy);
    catalog.files.push_back({raw.opened[f], header.data_begin, std::move(header.metadata),
                             written_by.empty() ? std::string() : written_by.mapped()});
    size_t next = 0;  // of the checksums: as most stand
    if (f == begin) tensors.reserve(header.entries.size());
    for (Entry& entry : header.entries) {
      if (raw.weights) {
        const auto said = raw.weights->find(entry.name);
        if (said == raw.weights->end() || said->second != Path(file.path).filename().string())
          continue;  // the index does not name it: it is not there
      }
      const Checksum* const crc =
          next < crcs.size() && crcs[next].first == entry.name ? &crcs[next] : find_in(crcs, entry.name);
      if (crc != nullptr) next = static_cast<size_t>(crc - crcs.data()) + 1;
      tensors.push_back({f - begin, std::move(entry), crc == nullptr ? std::nullopt : std::optional(crc->second)});
    }
  }
  catalog.tensors = StoredTensors(std::move(tensors));
  if (raw.weights) {
    for (const auto& [tensor, file] : *raw.weights) {
      if (catalog.tensors.find(tensor) == nullptr)
        fail(Code::kCorrupt, "the index says that '{}' is in {}, which does not have it", tensor, file);
    }
  }
  return catalog;
}

constexpr size_t kFewBytes = 64 << 10;  // of a fact, which goes through one store; what is longer travels by itself

/// (1) Rank 0 reads what is there, for all.
Raw read_for_all(Group& group, const Path& path, const std::vector<std::string>& names,
                 std::chrono::milliseconds timeout, std::string& machine_of_first) {
  Raw raw;
  std::string long_text;
  const std::string first = comm::agree_on(
      group, base::after(timeout),
      [&] {
        if (group.rank() != 0) return std::string();
        raw = read_raw(path, names);
        if (group.size() == 1) return std::string();
        std::string text = pack_raw(raw);
        Sender out;
        out.text(base::view_of_files());
        out.number(static_cast<int64_t>(text.size()));
        if (text.size() <= kFewBytes) out.text(text);
        if (text.size() > kFewBytes) long_text = std::move(text);
        return out.bytes();
      },
      comm::of_first);
  if (group.size() == 1) return raw;
  Receiver in(first);
  machine_of_first = in.text();
  const auto size = static_cast<size_t>(in.number());
  if (size > kFewBytes) {
    long_text.resize(size);
    group.broadcast(std::as_writable_bytes(std::span(long_text)), 0, base::after(timeout));
  }
  return group.rank() == 0 ? std::move(raw) : unpack_raw(size > kFewBytes ? long_text : in.text());
}

/// Whether what is there is what rank 0 found.
bool is_found_here(const Path& path, Raw& raw, const std::string& view_of_first) {
  try {
    return open_same(path, raw, !view_of_first.empty() && view_of_first == base::view_of_files());
  } catch (const Error& error) {
    if (error.code() != Code::kNotFound) throw;
    throw Error(
        Code::kIo,
        fmt::format(
            "{}: rank 0 found it, and it is not there on {}: the path is not on storage that all machines share",
            path.string(), base::host_name()),
        ENOENT);
  }
}

using Told = std::function<std::string(const Raw&)>;

/// One version for all ranks, and what everybody's words come to, behind a plus; behind a minus who came too late for
/// it.
std::string try_version(Group& group, const Path& path, const std::vector<std::string>& names,
                        std::chrono::milliseconds timeout, const Told& told, const comm::SumUp& sum_up) {
  std::string first;
  Raw raw = read_for_all(group, path, names, timeout, first);
  const auto told_here = [&] {  // (2) every rank opens the same
    if (group.rank() != 0 && !is_found_here(path, raw, first))
      return fmt::format("-rank {} on {}", group.rank(), base::host_name());
    const std::string words = told(raw);
    return words.empty() ? words : "+" + words;
  };
  const auto together = [&](std::vector<std::string> words) {
    for (std::string& one : words) {
      if (one.starts_with('-')) return one;
      if (!one.empty()) one.erase(0, 1);
    }
    return "+" + sum_up(words);
  };
  return comm::agree_on(group, base::after(timeout), told_here, together);
}

std::string with_one_version(Group& group, const Path& path, const std::vector<std::string>& names,
                             std::chrono::milliseconds timeout, const Told& told,
                             const comm::SumUp& sum_up = comm::of_first) {
  constexpr int kAttempts = 50;
  std::string said;
  for (int left = kAttempts; left > 0; --left) {
    said = try_version(group, path, names, timeout, told, sum_up);
    if (!said.starts_with('-')) return said.empty() ? said : said.substr(1);
  }
  const std::string message = fmt::format(
      "{}: {} does not find what rank 0 found, {} times; is it replaced all the time, or not on storage that all "
      "machines share?",
      path.string(), said.substr(1), kAttempts);
  throw Error(Code::kIo, message, ESTALE);
}

}  // namespace

const Metadata& Catalog::metadata() const {
  static const Metadata none;
  return files.empty() ? none : files.front().metadata;
}

const Stored& Catalog::find(std::string_view name) const {
  const Stored* const found = tensors.find(name);
  if (found == nullptr) fail(Code::kNotFound, "{} has no tensor '{}'", path, name);
  return *found;
}

StoredTensors::StoredTensors(std::vector<Stored> all) : all_(std::move(all)) {
  order(all_);
}

const Stored* StoredTensors::find(std::string_view name) const noexcept {
  return find_in(all_, name);
}

Discussed discuss_catalog(Group& group, const Path& path, std::chrono::milliseconds timeout,
                          const std::function<std::string(const std::shared_ptr<const Catalog>&)>& told,
                          const comm::SumUp& sum_up) {
  Discussed found;
  const auto told_of = [&](const Raw& raw) {
    found.catalog = std::make_shared<const Catalog>(to_catalog(raw, path.string(), 0, raw.files.size()));
    return told(found.catalog);
  };
  found.said = with_one_version(group, path, {}, timeout, told_of, sum_up);
  return found;
}

Catalog share_catalog(Group& group, const Path& path, std::chrono::milliseconds timeout) {
  Catalog catalog;
  with_one_version(group, path, {}, timeout, [&](const Raw& raw) {
    catalog = to_catalog(raw, path.string(), 0, raw.files.size());
    return std::string();
  });
  return catalog;
}

std::vector<Catalog> share_catalogs(Group& group, const Path& directory, const std::vector<std::string>& names,
                                    std::chrono::milliseconds timeout) {
  std::vector<Catalog> catalogs;
  with_one_version(group, directory, names, timeout, [&](const Raw& raw) {
    catalogs.clear();
    for (size_t f = 0; f < raw.files.size(); ++f) catalogs.push_back(to_catalog(raw, raw.files[f].path, f, f + 1));
    return std::string();
  });
  return catalogs;
}

}  // namespace shardow::file
