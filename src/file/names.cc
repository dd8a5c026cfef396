#include "file/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "base/errors.h"
#include "base/paths.h"
#include "file/index.h"

namespace shardow::file {
namespace {

using base::Path;

constexpr size_t kNonce = 16;
constexpr size_t kMostName = 255;  // bytes that file systems take
constexpr size_t kMostStem =
    kMostName - kNonce - std::string_view("..-renamed.tmp").size();  // of the longest temporary name
constexpr std::array<const char*, 4> kEnds = {".tmp", "-renamed.tmp", "-old.tmp", "-spent.tmp"};  // by Temporary

bool are_digits(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool are_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

/// FNV-1a: the same for ever.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

std::string stem_of(const std::string& name) {
  if (name.size() <= kMostStem) return name;
  size_t length = kMostStem - kNonce - 1;
  while (length > 0 && (static_cast<unsigned char>(name[length]) & 0xc0) == 0x80) --length;  // not inside a character
  return fmt::format("{}~{:016x}", std::string_view(name).substr(0, length), hash_of(name));
}

std::string prefix_of(const Path& target) {
  return "." + stem_of(target.filename().string()) + ".";
}

}  // namespace

std::optional<Path> old_of(const Path& target) {
  std::optional<Path> newest;
  if (base::look_at_itself(target)) return newest;
  int64_t when = 0;
  for (const Leftover& one : leftovers_of(target)) {
    const auto found = base::look_at_itself(one.path);
    if (one.kind != Temporary::kOld || !found || (newest && found->changed_ns() < when)) continue;
    newest = one.path;
    when = found->changed_ns();
  }
  return newest;
}

bool is_shard_name(std::string_view name) {
  constexpr std::string_view kBegin = "model-", kBetween = "-of-", kEnd = ".safetensors";
  if (!name.starts_with(kBegin) || !name.ends_with(kEnd) || name.size() < kBegin.size() + kEnd.size()) return false;
  name = name.substr(kBegin.size(), name.size() - kBegin.size() - kEnd.size());
  if (name.size() > kNonce && name[kNonce] == '-' && are_hex(name.substr(0, kNonce))) name.remove_prefix(kNonce + 1);
  const size_t between = name.find(kBetween);
  if (between == std::string_view::npos) return false;
  const std::string_view number = name.substr(0, between), count = name.substr(between + kBetween.size());
  return number.size() >= 5 && count.size() >= 5 && are_digits(number) && are_digits(count);
}

bool is_shard_of_a_save(std::string_view name) {
  constexpr size_t kBegin = std::string_view("model-").size();
  return is_shard_name(name) && name.size() > kBegin + kNonce && name[kBegin + kNonce] == '-' &&
         are_hex(name.substr(kBegin, kNonce));
}

std::set<std::string> names_in_index(const Path& directory) {
  std::set<std::string> names;
  try {
    if (base::look_at(directory / kIndexName)) {
      for (const auto& [tensor, file] : read_index(base::File::open(directory / kIndexName))) {
        if (file.ends_with(".safetensors")) names.insert(file);
      }
    }
  } catch (const Error&) {  // an index that cannot be read names nothing
  }
  return names;
}

std::set<std::string> hugging_face_names(const Path& directory) {
  std::set<std::string> names = names_in_index(directory);
  names.insert({kSingleName, kIndexName});
  for (const std::string& name : base::names_in(directory)) {
    if (is_shard_name(name)) names.insert(name);
  }
  return names;
}

Path temporary_path(const Path& target, const std::string& nonce, Temporary kind) {
  return base::parent_of(target) / (prefix_of(target) + nonce + kEnds[static_cast<size_t>(kind)]);
}

std::vector<Leftover> leftovers_of(const Path& target) {
  const std::string prefix = prefix_of(target);
  std::vector<Leftover> found;
  for (const std::string& name : base::names_in(base::parent_of(target))) {
    if (name.size() < prefix.size() + kNonce || !name.starts_with(prefix)) continue;
    const std::string_view rest = std::string_view(name).substr(prefix.size());
    const auto end = std::find(kEnds.begin(), kEnds.end(), rest.substr(kNonce));
    if (are_hex(rest.substr(0, kNonce)) && end != kEnds.end())
      found.push_back({base::parent_of(target) / name, static_cast<Temporary>(end - kEnds.begin()),
                       std::string(rest.substr(0, kNonce))});
  }
  std::sort(found.begin(), found.end(), [](const Leftover& a, const Leftover& b) { return a.path < b.path; });
  return found;
}

Path standing(const Path& path) {
  const Path plain = path.has_filename() ? path : path.parent_path();
  if (!plain.has_filename()) return path;
  if (const auto old = old_of(plain)) return *old;
  if (!plain.parent_path().has_filename()) return path;
  const auto old = old_of(plain.parent_path());
  return old ? *old / plain.filename() : path;
}

}  // namespace shardow::file
