// Clock: the counters of averages in training, and the numbers of their next step. It knows neither memory nor devices.
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
  int64_t step = 0;          // last step that update() got or counted
  int64_t updates = 0;       // averages applied, copies at or before start_step not counted
  int64_t applied_step = 0;  // the step of the last update that changed the averages
  double applied_samples = 0;
  int64_t held_non_finite = 0;

  /// Returns the training samples seen at the next step, if each step since the averages last changed has `batch`.
  double samples_by(double batch) const noexcept {
    return applied_samples + batch * static_cast<double>(step + 1 - applied_step);
  }
};

/// Owns the counters and the options in force. A saved state has the counters and the options that decide numbers:
/// schedules, dtype, rule, rounding, update_every, start_step, seed.
struct Clock {
  Counters counters;
  AverageOptions options;

  /// Returns the step that update(step) counts. Throws kInvalidArgument where that has been counted.
  int64_t next(std::optional<int64_t> step) const;
  /// Returns whether the update copies: up to start_step, and the first one past it where none came before. The
  /// averages never begin with weights from long before.
  bool copies_at(int64_t step) const noexcept;
  bool skips(int64_t step) const noexcept;                         ///< by update_every
  Progress progress(int64_t step, double samples) const noexcept;  ///< of a step that comes next, if it is averaged
  /// Returns the numbers that a kernel needs for the step, by `factors`, or by the schedules where that is empty.
  /// Throws what schedules throw.
  kernels::Step plan(int64_t step, double samples, std::span<const Factors> factors) const;
  /// Returns whether the step rounds stochastically, by the elements' places in their global tensors.
  bool draws_noise(const kernels::Step& step) const noexcept;
  void count(int64_t step, double samples) noexcept;

  std::vector<double> decays() const;  ///< of the next step; NaN where a schedule has none
  /// Returns this clock with the counters of `saved`, and its options where `from` is the file. Throws where they don't
  /// fit; `of_kernels`: as check_options().
  Clock with(const Clock& saved, OptionsFrom from, bool of_kernels) const;
  std::string to_json() const;  ///< canonical
};

/// Returns the clock of a saved state; options that do not decide numbers are `own`. Throws kCorrupt with the offending
/// text, also for counters that no Average can have.
Clock clock_from_json(std::string_view json, AverageOptions own = {});

/// Returns the schedules of a saved state, whatever else it has. Throws kCorrupt.
std::vector<Schedule> schedules_in(std::string_view json);

/// Returns the options that decide numbers as (name, text), in a fixed order, for messages.
std::vector<std::pair<std::string, std::string>> named(const AverageOptions& options);

/// Returns the options that decide numbers and differ, in a fixed order.
std::vector<OptionDifference> differences(const AverageOptions& file, const AverageOptions& own);

}  // namespace shardow::average
