// Weighted sums in float64 of tensors in the four averaged dtypes. noexcept, without allocations; in IEEE 754's default
// environment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "shardow/tensor_view.h"

namespace shardow::kernels {

inline constexpr size_t kMostTerms = 4;

struct Term {
  const void* data;
  double coefficient;
};

namespace reference {
void add_terms(std::span<const Term> terms, DType dtype, bool first, double* sums, int64_t count) noexcept;
double round_sums(const double* sums, void* to, DType to_dtype, int64_t count) noexcept;
}  // namespace reference

namespace cpu {
/// sums[i] += coefficient * data[i] for one term after the other, fused; the first term of a sum, of which `sums` has
/// nothing yet, is only multiplied. One to kMostTerms of them, which pass through registers: the sums are loaded and
/// stored once.
void add_terms(std::span<const Term> terms, DType dtype, bool first, double* sums, int64_t count) noexcept;
/// Rounds each once, to nearest even. Every NaN becomes the same one. Returns the largest finite magnitude among them,
/// 0 of none: where `to_dtype` has no such number, it has become infinite.
double round_sums(const double* sums, void* to, DType to_dtype, int64_t count) noexcept;
}  // namespace cpu

}  // namespace shardow::kernels
