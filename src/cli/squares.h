// Sums of squares of numbers of any size.
#pragma once

namespace shardow::cli {

/// A sum of squares that neither overflows nor underflows: those of numbers below 2^-400 and above 2^400 are kept
/// apart, scaled (J. L. Blue, A Portable Fortran Program to Find the Euclidean Norm of a Vector, 1978).
struct Squares {
  double small = 0, middle = 0, large = 0;  ///< small is times 2^1200, large times 2^-1200

  void add(double number) noexcept;
  Squares& operator+=(const Squares& next) noexcept;
  bool zero() const noexcept { return small == 0 && middle == 0 && large == 0; }

  /// The square root as root * 2^exponent.
  struct Root {
    double root;
    int exponent;
  };
  Root root() const noexcept;
};

inline constexpr double kSmallest = 0x1p-400, kLargest = 0x1p400;  ///< of Squares::middle

}  // namespace shardow::cli
