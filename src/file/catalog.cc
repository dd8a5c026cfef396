#include "file/catalog.h"

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

std::map<std::string, uint32_t> checksums_in(const Metadata& metadata, const std::string& where) {
  std::map<std::string, uint32_t> found;
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
    found.emplace_hint(found.end(), members.key(), crc);  // they stand in order, mostly
  }
  if (!members.error().empty()) fail(Code::kCorrupt, "{}: {} is no JSON object: {}", where, kChecksums, members.error());
  return found;
}

/// Of files [begin, end).
Catalog to_catalog(const Raw& raw, const std::string& path, size_t begin, size_t end) {
  Catalog catalog;
  catalog.path = path;
  for (size_t f = begin; f < end; ++f) {
    const Raw::Text& file = raw.files[f];
    Header header = parse_header(file.json, file.data_bytes, file.path);
    const std::map<std::string, uint32_t> crcs = checksums_in(header.metadata, file.path);
    header.metadata.erase(kChecksums);
    const auto written_by = header.metadata.extract(kWrittenBy);
    catalog.files.push_back(
        {raw.opened[f], header.data_begin, std::move(header.metadata), written_by.empty() ? std::string() : written_by.mapped()});
    auto crc = crcs.begin();
    for (Entry& entry : header.entries) {
      if (raw.weights) {
        const auto said = raw.weights->find(entry.name);
        if (said == raw.weights->end() || said->second != Path(file.path).filename().string())
          continue;  // the index does not name it: it is not there
      }
      if (crc == crcs.end() || crc->first != entry.name) crc = crcs.find(entry.name);
      std::string name = entry.name;
      const std::optional<uint32_t> sum =
          crc == crcs.end() ? std::nullopt : std::optional((crc++)->second);  // the next one is next, mostly
      catalog.tensors.emplace_hint(catalog.tensors.end(), std::move(name), Stored{f - begin, std::move(entry), sum});
    }
  }
  if (raw.weights) {
    for (const auto& [tensor, file] : *raw.weights) {
      if (!catalog.tensors.contains(tensor))
        fail(Code::kCorrupt, "the index says that '{}' is in {}, which does not have it", tensor, file);
    }
  }
  return catalog;
}

constexpr size_t kFewBytes = 64 << 10;  // of a fact, which goes through one store; what is longer travels by itself

/// (1) Rank 0 reads what is there, for all.
Raw read_for_all(Group& group, const Path& path, const std::vector<std::string>& names, std::chrono::milliseconds timeout,
                 std::string& machine_of_first) {
  Raw raw;
  std::string long_text;
  const std::string first = comm::agree_on(
      group, base::now() + timeout,
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
    group.broadcast(std::as_writable_bytes(std::span(long_text)), 0, base::now() + timeout);
  }
  return group.rank() == 0 ? std::move(raw) : unpack_raw(size > kFewBytes ? long_text : in.text());
}

/// Whether what is there is what rank 0 found.
bool is_found_here(const Path& path, Raw& raw, const std::string& view_of_first) {
  try {
    return open_same(path, raw, !view_of_first.empty() && view_of_first == base::view_of_files());
  } catch (const Error& error) {
    if (error.code() != Code::kNotFound) throw;
    throw Error(Code::kIo,
                fmt::format("{}: rank 0 found it, and it is not there on {}: the path is not on storage that all machines share",
                            path.string(), base::host_name()),
                ENOENT);
  }
}

using Told = std::function<std::string(const Raw&)>;

/// One version for all ranks, and what everybody's words come to, behind a plus; behind a minus who came too late for it.
std::string try_version(Group& group, const Path& path, const std::vector<std::string>& names, std::chrono::milliseconds timeout,
                        const Told& told, const comm::SumUp& sum_up) {
  std::string first;
  Raw raw = read_for_all(group, path, names, timeout, first);
  const auto told_here = [&] {  // (2) every rank opens the same
    if (group.rank() != 0 && !is_found_here(path, raw, first)) return fmt::format("-rank {} on {}", group.rank(), base::host_name());
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
  return comm::agree_on(group, base::now() + timeout, told_here, together);
}

std::string with_one_version(Group& group, const Path& path, const std::vector<std::string>& names, std::chrono::milliseconds timeout,
                             const Told& told, const comm::SumUp& sum_up = comm::of_first) {
  constexpr int kAttempts = 50;
  std::string said;
  for (int left = kAttempts; left > 0; --left) {
    said = try_version(group, path, names, timeout, told, sum_up);
    if (!said.starts_with('-')) return said.empty() ? said : said.substr(1);
  }
  const std::string message = fmt::format(
      "{}: {} does not find what rank 0 found, {} times; is it replaced all the time, or not on storage that all machines share?",
      path.string(), said.substr(1), kAttempts);
  throw Error(Code::kIo, message, ESTALE);
}

}  // namespace

const Metadata& Catalog::metadata() const {
  static const Metadata none;
  return files.empty() ? none : files.front().metadata;
}

const Stored& Catalog::find(std::string_view name) const {
  const auto found = tensors.find(name);
  if (found == tensors.end()) fail(Code::kNotFound, "{} has no tensor '{}'", path, name);
  return found->second;
}

Discussed discuss_catalog(Group& group, const Path& path, std::chrono::milliseconds timeout,
                          const std::function<std::string(const std::shared_ptr<const Catalog>&)>& told, const comm::SumUp& sum_up) {
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
