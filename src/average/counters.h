// Counters: where an Average stands, and its form in a saved state.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/average.h"

namespace shardow::average {

struct Counters {
  int64_t step = 0;          // last step that update() was told of or counted
  int64_t updates = 0;       // averages applied, copies at or before start_step not counted
  int64_t applied_step = 0;  // the step of the last update that changed the averages
  double applied_samples = 0;
  int64_t held_non_finite = 0;
};

/// What a saved state restores.
struct State {
  Counters counters;
  std::vector<Schedule> schedules;
  uint64_t seed = 0;
  int64_t update_every = 1;
  int64_t start_step = 0;
};

/// Canonical JSON of `options` and `counters`; rule, rounding and dtype are recorded for readers, and compared by nobody.
std::string to_json(const AverageOptions& options, const Counters& counters);

/// Throws kCorrupt with the offending text.
State state_from_json(std::string_view json);

}  // namespace shardow::average
