#include "shardow/ema_file.h"

#include <algorithm>
#include <utility>

#include "average/clock.h"
#include "base/errors.h"
#include "base/paths.h"
#include "ema/names.h"
#include "file/index.h"
#include "file/names.h"
#include "shardow/checkpoint.h"

namespace shardow {
namespace {

std::vector<std::string> keys_of(std::span<const Schedule> schedules) {
  std::vector<std::string> keys;
  for (const Schedule& schedule : schedules) keys.push_back(schedule.key());
  return keys;
}

bool stays_in_a_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '=' ||
         c == '_' || c == '-';
}

constexpr std::string_view kBegin = "ema-", kEnd = ".safetensors";

/// What may be an average's file, newest first.
std::vector<std::string> newest_first(const base::Path& directory) {
  std::vector<std::pair<int64_t, std::string>> found;
  for (std::string& name : base::names_in(directory)) {
    if (!name.starts_with(kBegin) || !name.ends_with(kEnd) || name.size() <= kBegin.size() + kEnd.size()) continue;
    if (const auto there = base::look_at(directory / name)) found.emplace_back(there->changed_ns(), std::move(name));
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> names;
  names.reserve(found.size());
  for (auto& [when, name] : found) names.push_back(std::move(name));
  return names;
}

bool has_a_model(const base::Path& directory) {
  std::error_code ignored;  // then opening it says why
  return std::filesystem::exists(directory / file::kSingleName, ignored) ||
         std::filesystem::exists(directory / file::kIndexName, ignored);
}

}  // namespace

std::vector<std::string> decay_keys(std::span<const Schedule> schedules) {
  std::vector<std::string> keys = keys_of(schedules);
  for (const std::string& key : keys) {
    if (std::count(keys.begin(), keys.end(), key) > 1)
      base::fail(Code::kInvalidArgument, "decay {} is given twice; each average needs a decay of its own", key);
  }
  return keys;
}

std::vector<std::string> decay_keys_in(const std::map<std::string, std::string>& metadata) {
  const auto state = metadata.find(kStateKey);
  if (state == metadata.end()) return {};
  try {
    return keys_of(average::schedules_in(state->second));
  } catch (const Error&) {  // something else under our key
    return {};
  }
}

std::string ema_file_name(std::string_view key) {
  std::string name;
  bool stays = true;
  for (const char c : key) {
    const bool stayed = std::exchange(stays, stays_in_a_name(c));
    if (stays || stayed) name += stays ? c : '-';  // one for a whole stretch of others
  }
  const size_t begin = std::min(name.find_first_not_of('-'), name.size());
  return fmt::format("{}{}{}", kBegin, name.substr(begin, name.find_last_not_of('-') + 1 - begin), kEnd);
}

std::vector<EmaFile> ema_files_in(const base::Path& directory, bool beside_a_model) {
  if (!beside_a_model && has_a_model(directory)) return {};
  const auto listing = file::listing_in(directory, file::kAveragesName);
  std::vector<std::string> names;  // of the averages' files
  if (listing) {
    for (const auto& [name, file] : listing->files) names.push_back(name);
  }
  for (const std::string& name : names.empty() ? newest_first(directory) : names) {
    std::vector<EmaFile> files;
    for (std::string& key : decay_keys_in(Checkpoint::open(directory / name).metadata())) {
      std::string named = ema_file_name(key);
      files.push_back({std::move(key), std::move(named)});
    }
    if (std::any_of(files.begin(), files.end(), [&](const EmaFile& one) { return one.name == name; })) return files;
  }
  return {};
}

}  // namespace shardow
