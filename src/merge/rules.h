// What inputs of a merge weigh: pure functions of how many they are, or of their steps; and the order of inputs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "shardow/merge.h"

namespace shardow {

inline constexpr const char* kMergeKey =
    "shardow.merge";  ///< in the metadata of a file: version, formula, step, inputs, as JSON

/// Throws kInvalidArgument where a step is not in 0 to 2^53.
void check_step(int64_t step);

Coefficients uniform_coefficients(size_t inputs);

/// As they are given, whatever their sum; or divided by it, which must not be 0 then.
Coefficients given_coefficients(std::vector<double> weights, bool normalize = false);

/// Inputs ascend in time: e_0 = x_0, e_j = d e_{j-1} + (1 - d) x_j; with `steps` d^(s_j - s_{j-1}) in place of d.
Coefficients ema_coefficients(size_t inputs, double decay);
Coefficients ema_coefficients(std::span<const int64_t> steps, double decay);

Coefficients lawa_coefficients(size_t inputs, size_t last);  ///< the mean of the last ones; 0 for the others

/// Nothing for other names.
std::optional<DecayCurve> find_decay_curve(
    std::string_view name) noexcept;  ///< "linear", "cosine", "inv-sqrt", "1-sqrt"

/// x_0 + sum of f_j (x_j - x_{j-1}), f_j the curve's mean from s_{j-1} to s_j: what a run would be that had taken the
/// differences at that learning rate. `steps` ascend strictly, from 0 to 2^53 at most; they may count tokens.
Coefficients decay_coefficients(DecayCurve curve, std::span<const int64_t> steps);

/// Ascending by (step, name) where every input has a step, else they stay as they are. Returns whether they have.
bool sort_by_step(std::vector<MergeInput>& inputs);

/// Throws kInvalidArgument, naming inputs without a step, or two with one step.
std::vector<int64_t> steps_of(std::span<const MergeInput> inputs);

/// Whose integers, booleans and metadata a merge has, whatever the coefficients: the input that is marked; where none
/// is, the last by (step, name), inputs without a step before those with one.
size_t newest_of(std::span<const MergeInput> inputs);

}  // namespace shardow
