// Counters: where an Average stands, and its form in a saved state.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardow/average.h"

namespace shardow::average {

struct Counters {
  int64_t step = 0;          // last step that update() was told of or counted
  int64_t updates = 0;       // averages applied, copies at or before start_step not counted
  int64_t applied_step = 0;  // the step of the last update that changed the averages
  double applied_samples = 0;
  int64_t held_non_finite = 0;

  /// Training samples seen at the next step, where each one since the last that changed the averages has `batch` of
  /// them.
  double samples_by(double batch) const noexcept {
    return applied_samples + batch * static_cast<double>(step + 1 - applied_step);
  }
};

/// What a saved state says: counters, and of the options those that decide numbers (schedules, dtype, rule, rounding,
/// update_every, start_step, seed).
struct State {
  Counters counters;
  AverageOptions options;
};

/// Canonical JSON of `options` and `counters`.
std::string to_json(const AverageOptions& options, const Counters& counters);

/// Options that decide numbers, as messages have them, by name in a fixed order.
std::vector<std::pair<std::string, std::string>> named(const AverageOptions& options);

/// Options that decide numbers and are not the same, in a fixed order.
std::vector<OptionDifference> differences(const AverageOptions& file, const AverageOptions& own);

/// Options that do not decide numbers are `own`. Throws kCorrupt with the offending text, also for counters that no
/// Average can have.
State state_from_json(std::string_view json, AverageOptions own = {});

/// Of a saved state, whatever else is in it. Throws kCorrupt.
std::vector<Schedule> schedules_in(std::string_view json);

/// Where both are Schedule::settable(): their decays are then what set_decay() made of them, and no option.
void take_settable(const std::vector<Schedule>& from, std::vector<Schedule>& into);

}  // namespace shardow::average
