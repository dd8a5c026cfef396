// Sizes and offsets that cannot wrap: int64 arithmetic that throws kInvalidArgument, with the numbers, where it would.
#pragma once

#include <cstdint>
#include <span>

#include "base/errors.h"

namespace shardow::base {

inline int64_t checked_add(int64_t a, int64_t b) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) fail(Code::kInvalidArgument, "{} + {} does not fit in 64 bits", a, b);
  return sum;
}

inline int64_t checked_mul(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) fail(Code::kInvalidArgument, "{} * {} does not fit in 64 bits", a, b);
  return product;
}

/// Elements of a tensor of this shape: 1 for a scalar, 0 if any size is 0. Throws kInvalidArgument for negative sizes
/// and where the product does not fit.
inline int64_t checked_product(std::span<const int64_t> shape) {
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) fail(Code::kInvalidArgument, "shape [{}] has a negative size", fmt::join(shape, ", "));
    empty = empty || size == 0;
  }
  if (empty) return 0;  // before multiplying: the other sizes of an empty tensor may be anything
  int64_t product = 1;
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(product, size, &product)) {
      fail(Code::kInvalidArgument, "shape [{}] has more elements than fit in 64 bits", fmt::join(shape, ", "));
    }
  }
  return product;
}

}  // namespace shardow::base
