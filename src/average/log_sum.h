// Computes the logarithm of the product of the decays of skipped steps, in time that grows with the logarithm of their
// number.
//
// A schedule's log-decay is monotone in the step: constant where it is clamped, at either end, and smooth between. Few
// steps are added one by one. Of many, constant ends are multiplied; what varies is added one by one near its ends,
// where it may be steep, and between them the sum is the Euler-Maclaurin formula's:
//
//   f(a) + ... + f(b)  =  integral from a - 1/2 to b + 1/2 of f  -  (f'(b + 1/2) - f'(a - 1/2)) / 24  +  O(f''')
//
// by Gauss-Legendre quadrature over panels that grow with their distance from the ends, so that each is far from what
// is steep.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

namespace shardow::average {

namespace log_sum {

inline constexpr int64_t kOneByOne = 4096;      // steps that are simply added
inline constexpr int64_t kMargin = 1024;        // steps beside the ends of what varies
inline constexpr double kNothingLeft = -800.0;  // exp() of this is 0: no further step matters
inline constexpr double kGrowth = 1.5;          // of a panel's distance from its end

/// Abscissas and weights on [-1, 1].
inline constexpr std::array<std::pair<double, double>, 4> kGauss8 = {{{0.1834346424956498, 0.3626837833783620},
                                                                      {0.5255324099163290, 0.3137066458778873},
                                                                      {0.7966664774136267, 0.2223810344533745},
                                                                      {0.9602898564975363, 0.1012285362903763}}};

template <typename Term>
double add(int64_t first, int64_t last, Term term) {
  double sum = 0;
  for (int64_t n = first; n <= last && sum > kNothingLeft; ++n) sum += term(static_cast<double>(n));
  return sum;
}

template <typename Term>
double panel(double from, double to, Term term) {
  const double centre = (from + to) / 2, half = (to - from) / 2;
  double sum = 0;
  for (const auto& [x, weight] : kGauss8) sum += weight * (term(centre - half * x) + term(centre + half * x));
  return half * sum;
}

/// Returns the integral from `from` to `to`, both at least `margin` away from what is steep: panels grow from both ends
/// to the middle.
template <typename Term>
double integral(double from, double to, double margin, Term term) {
  const double middle = (from + to) / 2;
  double sum = 0;
  for (double near = 0, far; from + near < middle; near = far) {
    far = std::min(near + (kGrowth - 1) * (margin + near), middle - from);
    sum += panel(from + near, from + far, term) + panel(to - far, to - near, term);
  }
  return sum;
}

/// Returns the first n > first at which term has another value than at first, or last + 1.
template <typename Term>
int64_t end_of_constant(int64_t first, int64_t last, Term term) {
  const double value = term(static_cast<double>(first));
  int64_t same = first, other = last + 1;
  while (other - same > 1) {
    const int64_t n = same + (other - same) / 2;
    (term(static_cast<double>(n)) == value ? same : other) = n;
  }
  return other;
}

}  // namespace log_sum

/// Returns term(first) + ... + term(last); any value below -800 where the sum is below -800. `term` maps a step, as a
/// double, to the logarithm of its decay, which is at most 0.
template <typename Term>
double sum_of_logs(int64_t first, int64_t last, Term term) {
  using namespace log_sum;
  if (last - first < kOneByOne) return add(first, last, term);
  const int64_t begin = end_of_constant(first, last, term);
  double sum = static_cast<double>(begin - first) * term(static_cast<double>(first));
  if (begin > last || !(sum > kNothingLeft)) return sum;
  // The constant end is the constant begin of the steps mirrored.
  const int64_t end = -end_of_constant(-last, -begin, [&](double n) { return term(-n); });
  sum += static_cast<double>(last - end) * term(static_cast<double>(last));
  if (end - begin < kOneByOne) return sum + add(begin, end, term);
  sum += add(begin, begin + kMargin - 1, term) + add(end - kMargin + 1, end, term);
  if (!(sum > kNothingLeft)) return sum;
  const auto a = static_cast<double>(begin + kMargin), b = static_cast<double>(end - kMargin);
  const double slopes = (term(b + 1) - term(b)) - (term(a) - term(a - 1));
  return sum + integral(a - 0.5, b + 0.5, static_cast<double>(kMargin), term) - slopes / 24;
}

}  // namespace shardow::average
