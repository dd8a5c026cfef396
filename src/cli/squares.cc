#include "cli/squares.h"

#include <cmath>

namespace shardow::cli {
namespace {

constexpr int kScale = 600;  // of what is smaller or larger, in powers of two

}  // namespace

void Squares::add(double number) noexcept {
  const double size = std::fabs(number);
  double& sum = size < kSmallest ? small : size > kLargest ? large : middle;
  const double scaled = size < kSmallest  ? std::ldexp(size, kScale)
                        : size > kLargest ? std::ldexp(size, -kScale)
                                          : size;
  sum = std::fma(scaled, scaled, sum);
}

Squares& Squares::operator+=(const Squares& next) noexcept {
  small += next.small;
  middle += next.middle;
  large += next.large;
  return *this;
}

Squares::Root Squares::root() const noexcept {
  if (large > 0) return {std::sqrt(large + std::ldexp(middle, -2 * kScale)), kScale};
  if (middle > 0) return {std::sqrt(middle + std::ldexp(small, -2 * kScale)), 0};
  return {std::sqrt(small), -kScale};
}

}  // namespace shardow::cli
