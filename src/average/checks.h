// Checks of the arguments of an Average, made before anything changes. Each error has the name, the numbers and a
// remedy.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "shardow/average.h"

namespace shardow::average {

/// Checks `options`. `of_kernels`: the engine's kernels do the work, which round 16-bit averages only stochastically.
void check_options(const AverageOptions& options, bool of_kernels);

/// Checks that names are unique, dtypes can be averaged, and views have memory.
void check_parameters(std::span<const TensorView> parameters);
void check_devices(std::span<const TensorView> parameters, const AverageOptions& options);
/// Refuses averages on a device with options.overlap; `averages` has one average of each parameter.
void check_overlap(std::span<const TensorView> parameters, std::span<const TensorView> averages,
                   const AverageOptions& options);

/// Returns whether both are the same device; the host is one.
bool same_place(const Device& a, const Device& b);

/// Checks that `averages` fit `parts`, the views that this rank averages.
void check_averages(std::span<const TensorView> parts, std::span<const std::vector<TensorView>> averages,
                    const AverageOptions& options);

/// Checks that no two of all these views share memory: a write into the first would change the second.
void check_apart(std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages = {});

/// Checks that `views` differ from `bound` only in addresses and streams.
void check_same(std::span<const TensorView> bound, std::span<const TensorView> views);

/// Checks that `views` have the dtypes that `bound` had when the averages were `done`.
void check_dtypes(std::span<const TensorView> bound, std::span<const TensorView> views, std::string_view done);

/// Checks that `weights` have the names and regions of `bound`; dtypes may differ (master weights are averaged, the
/// weights are evaluated).
void check_swappable(std::span<const TensorView> bound, std::span<const TensorView> weights);

}  // namespace shardow::average
