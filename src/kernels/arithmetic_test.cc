// The arithmetic of one element against formulas written out here, and the noise against what is asked of it: no bias,
// no pattern.
#include "kernels/arithmetic.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace shardow::kernels {
namespace {

template <class S>
S updated(Form form, double weight, Computing<S> p, S average, uint32_t noise = 0) {
  return next<S>(resolve<S>({form, 1 - weight, weight}), p, average, noise);
}

struct Draws {
  std::mt19937_64 random{1};
  double value() {
    return std::ldexp(std::uniform_real_distribution(-1.0, 1.0)(random), static_cast<int>(random() % 40) - 20);
  }
};

/// Operations that with_op() is compiled for; a variable of each notes it before main().
template <class S>
std::set<Op>& compiled() {
  static std::set<Op> operations;
  return operations;
}
template <class S, Op kOp>
const bool kNoted = (compiled<S>().insert(kOp), true);

template <class S>
std::set<Op> compiled_operations() {
  static_cast<void>(with_op<S>(Op::kCopy, []<Op kOp>() { return kNoted<S, kOp>; }));
  return compiled<S>();
}

TEST(Operations, AreCompiledForAveragesThatHaveThem) {
  const std::set<Op> narrow = {Op::kCopy, Op::kIntegerStep};
  EXPECT_EQ(compiled_operations<BF16>(), narrow);
  EXPECT_EQ(compiled_operations<F16>(), narrow);
  EXPECT_EQ(compiled_operations<float>().size(), 8u);
  EXPECT_EQ(compiled_operations<float>().count(Op::kIntegerStep), 0u);
}

template <class T>
class Forms : public ::testing::Test {};
using FloatTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Forms, FloatTypes);

TYPED_TEST(Forms, EqualTheirFormulas) {
  using T = TypeParam;
  Draws draws;
  for (int i = 0; i < 50000; ++i) {
    const T p = static_cast<T>(draws.value()), e = static_cast<T>(draws.value());
    const double weight = std::pow(10.0, std::uniform_real_distribution(-7.0, -0.001)(draws.random));
    const T w = static_cast<T>(weight), d = static_cast<T>(1 - weight);
    volatile T kept = e * d, added = p * w, moved = w * (e - p);  // each rounded by itself
    ASSERT_EQ(updated<T>(Form::kCopy, weight, p, e), p);
    ASSERT_EQ(updated<T>(Form::kLerp, weight, p, e), w < T(0.5) ? std::fma(w, p - e, e) : std::fma(w - 1, p - e, p));
    ASSERT_EQ(updated<T>(Form::kMulAdd, weight, p, e), std::fma(p, w, T(kept)));
    ASSERT_EQ(updated<T>(Form::kTwoProducts, weight, p, e), kept + added);
    ASSERT_EQ(updated<T>(Form::kDifference, weight, p, e), e - moved);
    ASSERT_EQ(updated<T>(Form::kFusedDifference, weight, p, e), std::fma(w, p - e, e));
    volatile T shared = (p - e) / T(7);
    ASSERT_EQ(updated<T>(Form::kQuotient, 1.0 / 7, p, e), e + shared);
  }
}

TYPED_TEST(Forms, GiveOneNanWhicheverWayItArose) {
  using T = TypeParam;
  const T infinity = static_cast<T>(HUGE_VAL),
          nan = std::is_same_v<T, float> ? T(float_of(0xffc12345u)) : T(double_of(0xfff8123456789abcu));
  const auto canonical_bits =
      bits_of(std::is_same_v<T, float> ? T(float_of(0x7fc00000u)) : T(double_of(0x7ff8000000000000u)));
  for (const Form form : {Form::kLerp, Form::kMulAdd, Form::kTwoProducts, Form::kDifference, Form::kFusedDifference,
                          Form::kQuotient, Form::kStochastic}) {
    EXPECT_EQ(bits_of(updated<T>(form, 0.1, nan, T(1))), canonical_bits);
    EXPECT_EQ(bits_of(updated<T>(form, 0.1, T(1), nan)), canonical_bits);
    EXPECT_EQ(bits_of(updated<T>(form, 0.1, -infinity, infinity)), canonical_bits);
  }
  EXPECT_EQ(bits_of(updated<T>(Form::kLerp, 0.1, T(1), infinity)), canonical_bits)
      << "as torch.lerp: Inf + W (1 - Inf)";
  EXPECT_EQ(updated<T>(Form::kMulAdd, 0.1, T(1), infinity), infinity) << "as mul_().add_()";
}

TEST(Stochastic, IsLerpForLargeWeightsAndDoubles) {
  Draws draws;
  for (uint32_t noise = 0; noise < 1000; ++noise) {
    const double p = draws.value(), e = draws.value();
    const auto bits = noise * 0x9e3779b9u;
    EXPECT_EQ(updated<float>(Form::kStochastic, 0.5, float(p), float(e), bits),
              updated<float>(Form::kLerp, 0.5, float(p), float(e)));
    EXPECT_EQ(updated<double>(Form::kStochastic, 1e-5, p, e, bits), updated<double>(Form::kLerp, 1e-5, p, e));
  }
}

TEST(Stochastic, EqualsItsFormula) {
  Draws draws;
  for (int i = 0; i < 50000; ++i) {
    const auto p = static_cast<float>(draws.value()), e = static_cast<float>(draws.value());
    const auto noise = static_cast<uint32_t>(draws.random());
    const int odd = 2 * static_cast<int>((noise ^ 0x80000000u) >> 16) - 65535;
    const float ulp = std::nextafter(std::fabs(e), HUGE_VALF) - std::fabs(e);
    const auto w = static_cast<float>(1e-5);
    ASSERT_EQ(updated<float>(Form::kStochastic, 1e-5, p, e, noise),
              e + std::fma(w, p - e, static_cast<float>(odd) / 131072.0f * ulp));
  }
}

template <class S>
S value_of(double x) {
  return convert<S>(x);
}

template <class S>
class Rounding : public ::testing::Test {};
using RoundedTypes = ::testing::Types<float, BF16, F16>;
TYPED_TEST_SUITE(Rounding, RoundedTypes);

TYPED_TEST(Rounding, AWeightAtRestKeepsItsAverage) {
  using S = TypeParam;
  for (const double x : {1.0, -1.0, 0.5, 2.0, 1.25, -0.0, 0.0, 1e-7, 65504.0, 6e-8, 1e-30}) {
    const S average = value_of<S>(x);
    for (uint32_t i = 0; i < 10000; ++i) {
      const S result = updated<S>(Form::kStochastic, 1e-4, convert<float>(average), average, noise_bits({1, 2}, i));
      ASSERT_EQ(convert<float>(result), convert<float>(average)) << x;
    }
  }
}

TYPED_TEST(Rounding, HasNoBias) {
  using S = TypeParam;
  constexpr int kDraws = 1 << 20;
  // Average, distance to the parameter in units of the average, weight. Increments from a thousandth of an ulp to
  // several.
  const double cases[][3] = {{1.2345, 1e-2, 1e-4}, {1.2345, -0.3, 1e-5}, {-0.71, 0.9, 1e-3},
                             {100.3, -1.0, 1e-2},  {0.0123, 5.0, 0.2},   {-1.7, 1e-5, 1e-3}};
  for (const auto& [center, relative, weight] : cases) {
    const S average = value_of<S>(center);
    const double e = convert<double>(average),
                 ulp = std::fabs(convert<double>(value_of<S>(e * (std::is_same_v<S, float> ? 1 + 1.5e-7 : 1.01))) - e);
    const auto p = static_cast<float>(e * (1 + relative));
    const double exact = weight * (static_cast<double>(p) - e);
    double sum = 0, squares = 0;
    for (int i = 0; i < kDraws; ++i) {
      const double change = convert<double>(updated<S>(Form::kStochastic, weight, p, average,
                                                       noise_bits({77, 78}, static_cast<uint32_t>(i)))) -
                            e;
      sum += change;
      squares += change * change;
    }
    const double mean = sum / kDraws, sigma = std::sqrt(std::max(0.0, squares / kDraws - mean * mean) / kDraws);
    // Besides chance, the noise has 16 bits, and W is rounded to float.
    EXPECT_NEAR(mean, exact, 5 * sigma + ulp * 0x1p-16 + std::fabs(exact) * 0x1p-22)
        << center << ", " << relative << ", " << weight;
  }
}

TYPED_TEST(Rounding, FollowsWhereRoundingToNearestStandsStill) {
  using S = TypeParam;
  constexpr int kElements = 2048, kSteps = 3000;
  const double start = 1.0, target = 1.0 + 0x1p-3, weight = std::is_same_v<S, float> ? 2e-7 : 1e-4;
  std::vector<S> averages(kElements, value_of<S>(start));
  for (int step = 0; step < kSteps; ++step) {
    const NoiseKey key = noise_key(5, step, 6, 0, 0);
    for (int i = 0; i < kElements; ++i) {
      averages[static_cast<size_t>(i)] =
          updated<S>(Form::kStochastic, weight, static_cast<float>(target), averages[static_cast<size_t>(i)],
                     noise_bits(key, static_cast<uint32_t>(i)));
    }
  }
  double mean = 0;
  for (const S average : averages) mean += convert<double>(average) / kElements;
  const double exact = target + (start - target) * std::pow(1 - weight, kSteps);
  const double ulp = std::ldexp(1.0, std::is_same_v<S, float> ? -23 : std::is_same_v<S, BF16> ? -7 : -10);
  // A step adds at most ulp^2 q to the variance, q = its expected increment in ulps, at most all the way; and 16 bits
  // of noise leave up to 2^-17 ulp a step.
  const double sigma = std::sqrt(ulp * (exact - start) / kElements);
  EXPECT_NEAR(mean, exact, 5 * sigma + kSteps * ulp * 0x1p-17);
  EXPECT_GT(exact - start, 5 * sigma + kSteps * ulp * 0x1p-17) << "standing still would pass";
}

TEST(IntegerStep, NeverTurnsAFiniteAverageIntoInfinity) {
  for (uint32_t i = 0; i < 10000; ++i) {
    const uint32_t noise = noise_bits({3, 4}, i);
    ASSERT_EQ(updated<F16>(Form::kLerp, 0.4, 3e38f, F16{0x7bff}, noise).bits, 0x7bff);
    ASSERT_EQ(updated<F16>(Form::kLerp, 0.4, -3e38f, F16{0xfbff}, noise).bits, 0xfbff);
    ASSERT_EQ(updated<BF16>(Form::kLerp, 0.4, 0x1.ff8p127f, BF16{0x7f7f}, noise).bits, 0x7f7f);
  }
  EXPECT_EQ(updated<F16>(Form::kLerp, 0.4, HUGE_VALF, F16{0x3c00}).bits, 0x7c00)
      << "an infinite parameter, not held, still shows";
  EXPECT_EQ(updated<BF16>(Form::kLerp, 0.4, std::nanf(""), BF16{0x3f80}).bits, 0x7fc0);
}

TEST(IntegerStep, LeavesZero) {
  for (const double target : {1.0, 1e-6, -3e-5}) {
    double f16 = 0, bf16 = 0;
    constexpr int kDraws = 100000;
    for (uint32_t i = 0; i < kDraws; ++i) {
      f16 += to_float(updated<F16>(Form::kStochastic, 0.01, float(target), F16{0}, noise_bits({5, 6}, i))) / kDraws;
      bf16 += to_float(updated<BF16>(Form::kStochastic, 0.01, float(target), BF16{0}, noise_bits({5, 6}, i))) / kDraws;
    }
    const double f16_sigma =
        std::sqrt(std::max(0x1p-24, std::fabs(target) * 0.01 * 0x1p-10) * std::fabs(target) * 0.01 / kDraws);
    EXPECT_NEAR(f16, target * 0.01, 5 * f16_sigma + 0x1p-24 * 0x1p-16);
    EXPECT_NEAR(bf16, target * 0.01, std::fabs(target) * 0.01 * (0x1p-16 + 5 * 0x1p-7 / std::sqrt(kDraws)));
  }
}

TEST(Noise, IsABijectionOfTheIndex) {
  std::set<uint32_t> seen;
  for (uint32_t i = 0; i < 300000; ++i)
    ASSERT_TRUE(seen.insert(noise_bits({0xdeadbeef, 0x12345678}, i * 14313u)).second);
}

TEST(Noise, DrawsEveryOddIntegerSymmetrically) {
  int64_t sum = 0;
  int32_t least = 0, most = 0;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    const int32_t draw = odd_draw(upper << 16 | 0x5555);
    ASSERT_EQ(draw & 1, 1);
    sum += draw;
    least = std::min(least, draw);
    most = std::max(most, draw);
  }
  EXPECT_EQ(sum, 0);
  EXPECT_EQ(least, -65535);
  EXPECT_EQ(most, 65535);
}

/// Correlation of the draws of two addresses, as a multiple of its standard deviation under independence.
template <class Left, class Right>
double correlation(Left&& left, Right&& right) {
  constexpr int kCount = 1 << 18;
  double sum = 0;
  for (uint32_t i = 0; i < kCount; ++i) sum += static_cast<double>(odd_draw(left(i))) * odd_draw(right(i));
  return sum / (65536.0 * 65536.0 / 3.0) / std::sqrt(kCount);
}

TEST(Noise, NeighboursInEveryCoordinateAreUncorrelated) {
  const auto at = [](uint64_t seed, int64_t step, uint64_t tensor, int average, uint32_t high) {
    return [key = noise_key(seed, step, tensor, average, high)](uint32_t i) { return noise_bits(key, i); };
  };
  const auto base = at(1, 2, 3, 0, 0);
  const auto next_element = [&](uint32_t i) { return base(i + 1); };
  const auto second = [&](uint32_t i) { return base(i) << 16; };
  EXPECT_LT(std::fabs(correlation(base, at(2, 2, 3, 0, 0))), 5);
  EXPECT_LT(std::fabs(correlation(base, at(1, 3, 3, 0, 0))), 5);
  EXPECT_LT(std::fabs(correlation(base, at(1, 2, 4, 0, 0))), 5);
  EXPECT_LT(std::fabs(correlation(base, at(1, 2, 3, 1, 0))), 5);
  EXPECT_LT(std::fabs(correlation(base, at(1, 2, 3, 0, 1))), 5);
  EXPECT_LT(std::fabs(correlation(base, next_element)), 5);
  EXPECT_LT(std::fabs(correlation(base, second)), 5);
  EXPECT_GT(std::fabs(correlation(base, base)), 100) << "the measure sees nothing";
}

TEST(Noise, IsPinned) {
  // Averages saved by one version continue bit-identically in the next: these numbers never change.
  const NoiseKey key = noise_key(1, 2, 3, 4, 5);
  EXPECT_EQ(key.start, 254690894u);
  EXPECT_EQ(key.mix, 3783000154u);
  EXPECT_EQ(split_mix(0), 0xe220a8397b1dcdafu) << "the published first output";
  EXPECT_EQ(noise_bits(key, 0), 873497967u);
  EXPECT_EQ(noise_bits(key, 123456789), 2259558403u);
}

}  // namespace
}  // namespace shardow::kernels
