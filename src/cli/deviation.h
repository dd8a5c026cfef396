// How far two stretches of numbers are apart, in float64.
#pragma once

#include <cstdint>
#include <span>

#include "cli/numbers.h"
#include "cli/squares.h"
#include "shardow/tensor_view.h"

namespace shardow::cli {

/// Of elements in order: sums of parts that are added in order do not depend on who computed them.
struct Deviation {
  bool equal_bytes = true;
  int64_t elements = 0;   ///< numbers: a C64 has two
  int64_t differing = 0;  ///< numbers of another value; NaN equals NaN, 0 equals -0
  int64_t not_finite =
      0;  ///< of these, where one of the two, or their difference, is NaN or infinite: they are not in what follows
  double most = 0;    ///< max |a - b|
  Squares squares;    ///< of a - b
  Squares squares_a;  ///< of a, of finite ones

  double rms() const noexcept;
  double relative() const noexcept;  ///< |a - b| / |a|, in norms; infinite where a is 0 and b is not

  Deviation& operator+=(const Deviation& next) noexcept;
};

inline constexpr int64_t kScratch = 16384;  ///< doubles

/// Of `a` and `b`, `count` elements each. `scratch` has kScratch doubles. The same numbers on every processor.
Deviation deviation(const std::byte* a, DType dtype_a, const std::byte* b, DType dtype_b, int64_t count,
                    std::span<double> scratch) noexcept;

}  // namespace shardow::cli
