#include "file/names.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/paths.h"

namespace shardow::file {
namespace {

using base::Path;

constexpr size_t kNonce = 16;
constexpr size_t kNumber = 5;      // digits of a shard's number, or more
constexpr size_t kMostName = 255;  // bytes that file systems take
constexpr std::string_view kEnd = ".tmp", kFileEnd = ".safetensors", kBetween = "-of-";
constexpr size_t kMostStem = kMostName - kNonce - std::string_view("..").size() - kEnd.size();

bool are_digits(std::string_view text) {
  return text.size() >= kNumber && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool is_nonce(std::string_view text) {
  const auto is_hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  return text.size() == kNonce && std::all_of(text.begin(), text.end(), is_hex);
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

Path beside(const Path& path, std::string_view middle) {
  return base::parent_of(path) / fmt::format(".{}.{}{}", stem_of(path.filename().string()), middle, kEnd);
}

/// Cuts "-00002-of-00005" off the end; false where there is no such end.
bool cut_number(std::string_view& name) {
  const size_t between = name.rfind(kBetween);
  if (between == std::string_view::npos || !are_digits(name.substr(between + kBetween.size()))) return false;
  const size_t number = name.substr(0, between).rfind('-');
  if (number == std::string_view::npos || !are_digits(name.substr(number + 1, between - number - 1))) return false;
  name = name.substr(0, number);
  return true;
}

}  // namespace

Path temporary_path(const Path& path, const std::string& nonce) {
  return beside(path, nonce);
}

Path lock_path(const Path& path) {
  return beside(path, "lock");
}

std::vector<Leftover> leftovers_in(const Path& folder) {
  std::vector<Leftover> all;
  for (const std::string& name : base::names_in(folder)) {
    const size_t least = 1 + 1 + kNonce + kEnd.size();
    if (name.size() <= least || name[0] != '.' || !name.ends_with(kEnd)) continue;
    const std::string_view rest = std::string_view(name).substr(1, name.size() - 1 - kEnd.size());
    const size_t dot = rest.size() - kNonce - 1;
    if (rest[dot] != '.' || !is_nonce(rest.substr(dot + 1))) continue;
    std::string stem(rest.substr(0, dot));
    all.push_back({folder / name, stem, folder / fmt::format(".{}.lock{}", stem, kEnd)});
  }
  std::sort(all.begin(), all.end(), [](const Leftover& a, const Leftover& b) { return a.path < b.path; });
  return all;
}

std::vector<Leftover> leftovers_of(const Path& path) {
  std::vector<Leftover> all = leftovers_in(base::parent_of(path));
  std::erase_if(all, [stem = stem_of(path.filename().string())](const Leftover& one) { return one.stem != stem; });
  return all;
}

std::string name_with_nonce(std::string_view name, const std::string& nonce, size_t index, size_t count) {
  constexpr size_t kMore = 64;  // bytes of what follows, or less
  if (name.ends_with(kFileEnd)) name.remove_suffix(kFileEnd.size());
  cut_number(name);
  return fmt::format("{}-{}-{:05}{}{:05}{}", name.substr(0, kMostName - kMore), nonce, index + 1, kBetween, count,
                     kFileEnd);
}

bool has_nonce(std::string_view name) {
  if (!name.ends_with(kFileEnd)) return false;
  name.remove_suffix(kFileEnd.size());
  return cut_number(name) && name.size() > kNonce && name[name.size() - kNonce - 1] == '-' &&
         is_nonce(name.substr(name.size() - kNonce));
}

}  // namespace shardow::file
