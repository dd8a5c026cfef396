// Clock: where averages stand in training, and what their next step is. Knows neither memory nor devices.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/step.h"
#include "shardow/average.h"

namespace shardow::average {

struct Counters {
  int64_t step = 0;          // last step that update() was given or counted
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

/// Owns the counters and the options in force. Those that decide numbers (schedules, dtype, rule, rounding,
/// update_every, start_step, seed) and the counters are what a saved state says.
struct Clock {
  Counters counters;
  AverageOptions options;

  /// Returns the step of an update that is given `step`. Throws kInvalidArgument for one that has been counted.
  int64_t next(std::optional<int64_t> step) const;
  /// Up to start_step, and the first update past it where none came before: the averages never begin with weights from
  /// long before.
  bool copies_at(int64_t step) const noexcept;
  bool skips(int64_t step) const noexcept;                         ///< by update_every
  Progress progress(int64_t step, double samples) const noexcept;  ///< of a step that comes next, if it is averaged
  /// The step in the numbers that a kernel needs, by the schedules or the factors `given`. Throws what schedules throw.
  kernels::Step plan(int64_t step, double samples, std::span<const Factors> given) const;
  /// It rounds stochastically, by elements' places in their global tensors.
  bool draws_noise(const kernels::Step& step) const noexcept;
  void count(int64_t step, double samples) noexcept;

  std::vector<double> decays() const;  ///< of the next step; NaN where a schedule has none
  /// This clock with a saved one's counters, and `from` the file its options. Throws where they don't fit;
  /// `of_kernels`: as check_options().
  Clock with(const Clock& saved, OptionsFrom from, bool of_kernels) const;
  std::string to_json() const;  ///< canonical
};

/// Returns the clock of a saved state; options that do not decide numbers are `own`. Throws kCorrupt with the offending
/// text, also for counters that no Average can have.
Clock clock_from_json(std::string_view json, AverageOptions own = {});

/// Of a saved state, whatever else is in it. Throws kCorrupt.
std::vector<Schedule> schedules_in(std::string_view json);

/// Options that decide numbers, as messages have them, by name in a fixed order.
std::vector<std::pair<std::string, std::string>> named(const AverageOptions& options);

/// Options that decide numbers and are not the same, in a fixed order.
std::vector<OptionDifference> differences(const AverageOptions& file, const AverageOptions& own);

}  // namespace shardow::average
