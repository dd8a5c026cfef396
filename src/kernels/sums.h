// Weighted sums in float64 of tensors in the four averaged dtypes. noexcept, without allocations; in IEEE 754's default environment.
#pragma once

#include <cstdint>

#include "shardow/tensor_view.h"

namespace shardow::kernels {

namespace reference {
void add_term(const void* term, DType dtype, double coefficient, bool first, double* sums, int64_t count) noexcept;
void round_sums(const double* sums, void* to, DType to_dtype, int64_t count) noexcept;
}  // namespace reference

namespace cpu {
/// sums[i] += coefficient * term[i], fused; the first term of a sum is only multiplied.
void add_term(const void* term, DType dtype, double coefficient, bool first, double* sums, int64_t count) noexcept;
/// Rounds each once, to nearest even. Every NaN becomes the same one.
void round_sums(const double* sums, void* to, DType to_dtype, int64_t count) noexcept;
}  // namespace cpu

}  // namespace shardow::kernels
