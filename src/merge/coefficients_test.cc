// Coefficients against the recursions and curves that define them, in long doubles and by numerical integration.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <random>

#include "merge/rules.h"
#include "shardow/error.h"

namespace shardow {
namespace {

using Long = long double;

void expect_near(const std::vector<double>& is, const std::vector<Long>& expected) {
  ASSERT_EQ(is.size(), expected.size());
  for (size_t j = 0; j < is.size(); ++j) EXPECT_NEAR(is[j], static_cast<double>(expected[j]), 1e-14) << j;
}

std::vector<int64_t> uneven_steps(int count, int64_t first = 1000) {
  std::mt19937_64 random(7);
  std::vector<int64_t> steps = {first};
  while (static_cast<int>(steps.size()) < count)
    steps.push_back(steps.back() + 1 + static_cast<int64_t>(random() % 900));
  return steps;
}

/// e = keep e + (1 - keep) x, over unit vectors.
std::vector<Long> by_recursion(size_t count, const std::function<Long(size_t)>& keep) {
  std::vector<Long> c(count, 0);
  c[0] = 1;
  for (size_t j = 1; j < count; ++j) {
    for (size_t i = 0; i < j; ++i) c[i] *= keep(j);
    c[j] = 1 - keep(j);
  }
  return c;
}

Long curve_at(DecayCurve curve, Long s, Long first, Long last) {
  const Long u = (s - first) / (last - first);
  switch (curve) {
    case DecayCurve::kLinear: return 1 - u;
    case DecayCurve::kCosine: return (1 + std::cos(std::acos(Long(-1)) * u)) / 2;
    case DecayCurve::kInvSqrt: return std::sqrt(first / s);
    default: return 1 - std::sqrt(u);
  }
}

/// Simpson's rule; from the first step in its square root, so that no slope is infinite.
Long mean_of(DecayCurve curve, Long a, Long b, Long first, Long last) {
  constexpr int kPanels = 2000;
  const Long from = std::sqrt(a - first), to = std::sqrt(b - first), h = (to - from) / kPanels;
  Long sum = 0;
  for (int i = 0; i <= kPanels; ++i) {
    const Long t = from + h * i;
    sum += curve_at(curve, first + t * t, first, last) * 2 * t * (i == 0 || i == kPanels ? 1 : i % 2 == 1 ? 4 : 2);
  }
  return sum * h / 3 / (b - a);
}

TEST(Coefficients, OfAMeanAndOfTheLast) {
  EXPECT_EQ(uniform_coefficients(4).values, std::vector<double>(4, 0.25));
  EXPECT_EQ(lawa_coefficients(5, 2).values, (std::vector<double>{0, 0, 0, 0.5, 0.5}));
  EXPECT_EQ(uniform_coefficients(4).formula, "uniform");
  EXPECT_THROW(uniform_coefficients(0), Error);
  EXPECT_THROW(lawa_coefficients(5, 6), Error);
  EXPECT_THROW(lawa_coefficients(5, 0), Error);
}

TEST(Coefficients, AsGivenOrNormalizedWhereThatIsAsked) {
  EXPECT_EQ(given_coefficients({0.5, 0.25}).values, (std::vector<double>{0.5, 0.25}));
  EXPECT_NE(given_coefficients({0.5, 0.25}).formula.find("sum 0.75"), std::string::npos);
  EXPECT_EQ(given_coefficients({1, 1, 2}, true).values, (std::vector<double>{0.25, 0.25, 0.5}));
  EXPECT_THROW(given_coefficients({1, -1}, true), Error);
  EXPECT_THROW(given_coefficients({1, INFINITY}), Error);
  EXPECT_THROW(given_coefficients({}), Error);
}

TEST(Coefficients, OfAnEmaAreItsRecursion) {
  for (const double decay : {0.0, 0.3, 0.9, 0.9999}) {
    expect_near(ema_coefficients(9, decay).values, by_recursion(9, [&](size_t) { return Long(decay); }));
    const std::vector<int64_t> steps = uneven_steps(9);
    const auto keep = [&](size_t j) { return std::pow(Long(decay), Long(steps[j] - steps[j - 1])); };
    expect_near(ema_coefficients(steps, decay).values, by_recursion(9, keep));
  }
  for (const double decay : {1.0, -0.1, std::nan("")}) EXPECT_THROW(ema_coefficients(3, decay), Error);
  EXPECT_THROW(ema_coefficients(std::vector<int64_t>{5, 5}, 0.5), Error);
}

TEST(Coefficients, OfACurveGiveEveryIntervalItsMean) {
  for (const char* name : {"linear", "cosine", "inv-sqrt", "1-sqrt"}) {
    const DecayCurve curve = *find_decay_curve(name);
    for (const int count : {2, 3, 12}) {
      const std::vector<int64_t> steps = uneven_steps(count);
      const Coefficients found = decay_coefficients(curve, steps);
      ASSERT_EQ(found.values.size(), steps.size());
      EXPECT_NEAR(std::accumulate(found.values.begin(), found.values.end(), 0.0), 1, 1e-15);
      Long implied = 0;
      for (size_t j = steps.size() - 1; j > 0; --j) {
        implied += found.values[j];
        const Long mean = mean_of(curve, Long(steps[j - 1]), Long(steps[j]), Long(steps.front()), Long(steps.back()));
        EXPECT_NEAR(static_cast<double>(implied), static_cast<double>(mean), 1e-12) << name << ", interval " << j;
      }
    }
  }
  EXPECT_FALSE(find_decay_curve("sqrt"));
}

TEST(Coefficients, OfACurveAreExactForTokensAndShortIntervals) {
  std::vector<int64_t> tokens = {4'000'000'000'000, 4'000'000'000'001, 4'500'000'000'000, 4'500'000'000'003,
                                 5'000'000'000'000};
  for (const char* name : {"linear", "cosine", "inv-sqrt", "1-sqrt"}) {
    const DecayCurve curve = *find_decay_curve(name);
    const std::vector<double> c = decay_coefficients(curve, tokens).values;
    Long implied = 0;
    for (size_t j = tokens.size() - 1; j > 0; --j) {
      implied += c[j];
      const Long middle = (Long(tokens[j - 1]) + Long(tokens[j])) / 2;
      if (tokens[j] - tokens[j - 1] > 10 || j == 1) continue;
      EXPECT_NEAR(static_cast<double>(implied), static_cast<double>(curve_at(curve, middle, 4e12L, 5e12L)), 1e-12)
          << name;
    }
  }
}

TEST(Coefficients, SayWhatWeightsByIndexWouldMiss) {
  EXPECT_EQ(*decay_coefficients(DecayCurve::kLinear, std::vector<int64_t>{0, 10, 20, 30}).index_error, 0);
  // Means over [0, 10] and [10, 100]: 0.95 and 0.45; by index 0.75 and 0.25.
  EXPECT_NEAR(*decay_coefficients(DecayCurve::kLinear, std::vector<int64_t>{0, 10, 100}).index_error, 0.2, 1e-15);
  EXPECT_NEAR(*ema_coefficients(std::vector<int64_t>{0, 1, 3}, 0.5).index_error, std::pow(0.5, 1.5) - 0.25, 1e-15);
  EXPECT_FALSE(uniform_coefficients(3).index_error);
}

TEST(Coefficients, TakeNoStepThatADoubleHasNot) {
  constexpr int64_t kMost = int64_t{1} << 53;
  EXPECT_NO_THROW(decay_coefficients(DecayCurve::kLinear, std::vector<int64_t>{0, kMost - 1, kMost}));
  for (const std::vector<int64_t>& steps : {std::vector<int64_t>{0, kMost + 1}, {-1, 5}}) {
    EXPECT_THROW(decay_coefficients(DecayCurve::kLinear, steps), Error);
    EXPECT_THROW(ema_coefficients(steps, 0.5), Error);
  }
}

TEST(Coefficients, OfACurveAskForStepsThatAscend) {
  for (const std::vector<int64_t>& steps : {std::vector<int64_t>{}, {5}, {5, 5}, {6, 5}})
    EXPECT_THROW(decay_coefficients(DecayCurve::kLinear, steps), Error);
  EXPECT_THROW(decay_coefficients(DecayCurve::kInvSqrt, std::vector<int64_t>{0, 5}), Error);
  EXPECT_NO_THROW(decay_coefficients(DecayCurve::kLinear, std::vector<int64_t>{0, 5}));
}

}  // namespace
}  // namespace shardow
