// What an Average refuses, each with the name, the numbers and the way out, before anything has changed.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "shardow/average.h"

namespace shardow::average {

/// `of_kernels`: by the engine's own, which round 16-bit averages stochastically alone.
void check_options(const AverageOptions& options, bool of_kernels);

/// Names unique, dtypes averaged, memory there.
void check_parameters(std::span<const TensorView> parameters);
void check_devices(std::span<const TensorView> parameters, const AverageOptions& options);
/// `averages` are one average of each.
void check_overlap(std::span<const TensorView> parameters, std::span<const TensorView> averages,
                   const AverageOptions& options);

/// Returns whether memory of both lies together; the host is one place.
bool same_place(const Device& a, const Device& b);

/// `averages` fit `parts`, the views that this rank averages.
void check_averages(std::span<const TensorView> parts, std::span<const std::vector<TensorView>> averages,
                    const AverageOptions& options);

/// No two of all these views share memory: what is written into one would be read as the other.
void check_apart(std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages = {});

/// `now` may differ from `bound` in addresses and streams alone.
void check_same(std::span<const TensorView> bound, std::span<const TensorView> now);

/// `now` has the dtypes that `was` had when the averages were `done`.
void check_dtypes(std::span<const TensorView> was, std::span<const TensorView> now, std::string_view done);

/// `weights` have the names and regions of `bound`; dtypes may differ (a master copy is averaged, the weights are
/// evaluated).
void check_swappable(std::span<const TensorView> bound, std::span<const TensorView> weights);

}  // namespace shardow::average
