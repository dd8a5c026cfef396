#include "file/catalog.h"

#include <cerrno>
#include <charconv>
#include <fstream>
#include <span>

#include "base/errors.h"
#include "file/layout.h"
#include "file/members.h"
#include "file/raw.h"
#include "file/together.h"
#include "file/wire.h"

namespace shardow::file {
namespace {

using base::fail;
using base::Path;
namespace fs = std::filesystem;

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
    found.emplace(members.key(), crc);
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
    catalog.files.push_back({raw.opened[f], header.data_begin});
    for (Entry& entry : header.entries) {
      if (raw.weights) {
        const auto said = raw.weights->find(entry.name);
        if (said == raw.weights->end() || said->second != Path(file.path).filename().string())
          continue;  // the index does not name it: it is not there
      }
      const auto crc = crcs.find(entry.name);
      std::string name = entry.name;
      const std::optional<uint32_t> sum = crc == crcs.end() ? std::nullopt : std::optional(crc->second);
      catalog.tensors.emplace(std::move(name), Stored{f - begin, std::move(entry), sum});
    }
    if (f == begin) catalog.metadata = std::move(header.metadata);
  }
  catalog.metadata.erase(kChecksums);
  if (raw.weights) {
    for (const auto& [tensor, file] : *raw.weights) {
      if (!catalog.tensors.contains(tensor))
        fail(Code::kCorrupt, "the index says that '{}' is in {}, which does not have it", tensor, file);
    }
  }
  return catalog;
}

/// Tells whether two processes see the same files under the same numbers: one kernel, one view of its mounts. Empty where that is unknown.
std::string machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code error;
  const Path mounts = fs::read_symlink("/proc/self/ns/mnt", error);
  return boot.empty() || error ? "" : boot + mounts.string();
}

/// Rank 0's bytes, on every rank.
std::string from_first(Group& group, std::string bytes, std::chrono::milliseconds timeout) {
  const auto deadline = [&] { return std::chrono::steady_clock::now() + timeout; };
  uint64_t size = bytes.size();
  group.all_reduce(std::span(&size, 1), Group::Op::kMax, deadline());
  bytes.resize(size);
  group.broadcast(std::as_writable_bytes(std::span(bytes)), 0, deadline());
  return bytes;
}

/// One version for all ranks, or nothing where some rank came too late for it.
std::optional<Raw> share_raw(Group& group, const Path& path, const std::vector<std::string>& names, std::chrono::milliseconds timeout) {
  Raw raw;
  together(group, timeout, [&] {
    if (group.rank() == 0) raw = read_raw(path, names);
  });
  if (group.size() == 1) return raw;
  Sender out;
  if (group.rank() == 0) {
    out.text(machine());
    out.text(pack(raw));
  }
  uint64_t others = 0;
  const std::string bytes = from_first(group, out.bytes(), timeout);
  together(group, timeout, [&] {
    if (group.rank() == 0) return;
    Receiver in(bytes);
    const std::string where = in.text();
    raw = unpack(in.text());
    others = open_same(path, raw, !where.empty() && where == machine()) ? 0 : 1;
  });
  group.all_reduce({&others, 1}, Group::Op::kMax, std::chrono::steady_clock::now() + timeout);
  return others == 0 ? std::optional(std::move(raw)) : std::nullopt;
}

Raw share_one_version(Group& group, const Path& path, const std::vector<std::string>& names, std::chrono::milliseconds timeout) {
  constexpr int kAttempts = 50;
  for (int left = kAttempts; left > 0; --left) {
    if (std::optional<Raw> raw = share_raw(group, path, names, timeout)) return std::move(*raw);
  }
  const std::string message =
      fmt::format("{}: the ranks found different versions of it, {} times; is it replaced all the time, or another file on some machine?",
                  path.string(), kAttempts);
  throw Error(Code::kIo, message, ESTALE);
}

}  // namespace

Catalog share_catalog(Group& group, const Path& path, std::chrono::milliseconds timeout) {
  const Raw raw = share_one_version(group, path, {}, timeout);
  return to_catalog(raw, path.string(), 0, raw.files.size());
}

std::vector<Catalog> share_catalogs(Group& group, const Path& directory, const std::vector<std::string>& names,
                                    std::chrono::milliseconds timeout) {
  const Raw raw = share_one_version(group, directory, names, timeout);
  std::vector<Catalog> catalogs;
  for (size_t f = 0; f < raw.files.size(); ++f) catalogs.push_back(to_catalog(raw, raw.files[f].path, f, f + 1));
  return catalogs;
}

}  // namespace shardow::file
