#include "shardow/ema_file.h"

#include <algorithm>
#include <utility>

#include "average/counters.h"
#include "base/errors.h"

namespace shardow {
namespace {

std::vector<std::string> keys_of(std::span<const Schedule> schedules) {
  std::vector<std::string> keys;
  for (const Schedule& schedule : schedules) keys.push_back(schedule.key());
  return keys;
}

bool stays_in_a_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '=' || c == '_' || c == '-';
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
  return "ema-" + name.substr(begin, name.find_last_not_of('-') + 1 - begin) + ".safetensors";
}

}  // namespace shardow
