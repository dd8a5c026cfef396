#include "cli/deviation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tensor/dtype.h"

namespace shardow::cli {
namespace {

template <class T>
Deviation between(const std::vector<T>& a, const std::vector<T>& b, DType dtype) {
  std::vector<double> scratch(kScratch);
  const auto* const x = reinterpret_cast<const std::byte*>(a.data());
  const auto* const y = reinterpret_cast<const std::byte*>(b.data());
  return deviation(x, dtype, y, dtype, static_cast<int64_t>(a.size()), scratch);
}

class Lengths : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(AroundVectorsAndBlocks, Lengths,
                         testing::Values(0, 1, 7, 15, 16, 17, 63, 8191, 8192, 8193, 18000));

/// The promise in words: element i of a block of kScratch / 2 in sum i mod 16, blocks and sums in order, by fused
/// multiply-adds.
TEST_P(Lengths, AreSummedInTheOrderThatIsPromised) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  std::vector<double> a(GetParam()), b;
  for (double& x : a) x = normal(random);
  b = a;
  for (size_t i = 0; i < b.size(); i += 3) b[i] += normal(random);
  double squares = 0, squares_a = 0, most = 0;
  for (size_t begin = 0; begin < a.size(); begin += kScratch / 2) {
    double block[16] = {}, block_a[16] = {};
    for (size_t i = begin; i < std::min(begin + kScratch / 2, a.size()); ++i) {
      double &sum = block[(i - begin) % 16], &sum_a = block_a[(i - begin) % 16];
      sum = std::fma(a[i] - b[i], a[i] - b[i], sum);
      sum_a = std::fma(a[i], a[i], sum_a);
      most = std::max(most, std::fabs(a[i] - b[i]));
    }
    double sum = 0, sum_a = 0;
    for (size_t lane = 0; lane < 16; ++lane) {
      sum += block[lane];
      sum_a += block_a[lane];
    }
    squares += sum;
    squares_a += sum_a;
  }
  const Deviation found = between(a, b, DType::kF64);
  EXPECT_EQ(found.squares.middle, squares);
  EXPECT_EQ(found.squares_a.middle, squares_a);
  EXPECT_EQ(found.most, most);
  EXPECT_EQ(found.differing, static_cast<int64_t>((a.size() + 2) / 3));
  EXPECT_EQ(found.elements, static_cast<int64_t>(a.size()));
  EXPECT_EQ(found.equal_bytes, a.empty());
  EXPECT_TRUE(between(a, a, DType::kF64).equal_bytes);
  EXPECT_EQ(between(a, a, DType::kF64).squares_a.middle, squares_a);
}

TEST(Deviation, LeavesOutWhatIsNotFiniteAndCountsIt) {
  constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> a = {1, kNan, kInf, -kInf, 2, kNan, 0, 1e308},
                            b = {1, kNan, kInf, kInf, kNan, 3, -0.0, -1e308};
  const Deviation found = between(a, b, DType::kF64);
  EXPECT_EQ(found.differing, 4);
  EXPECT_EQ(found.not_finite, 4);  // 2e308 is none either
  EXPECT_TRUE(found.squares.zero());
  EXPECT_FALSE(found.equal_bytes);
  EXPECT_EQ(found.relative(), 0);
  EXPECT_EQ(between(std::vector<double>{0, 0}, std::vector<double>{0, 1}, DType::kF64).relative(), kInf);
}

/// Their squares are not: 1e-400 and 1e400.
TEST(Deviation, IsRightForNumbersWhoseSquaresAreNone) {
  for (const double size : {1e-310, 1e-200, 1e-100, 1.0, 1e100, 1e200, 1e307}) {
    const std::vector<double> a(5000, 2 * size), b(5000, size);
    const Deviation found = between(a, b, DType::kF64);
    EXPECT_NEAR(found.rms() / size, 1, 1e-12) << size;
    EXPECT_NEAR(found.relative(), 0.5, 1e-12) << size;
    EXPECT_EQ(found.most, size);
    EXPECT_EQ(found.differing, 5000);
    EXPECT_EQ(found.not_finite, 0);
  }
  std::vector<double> a(18000, 0), b = a;  // blocks of each kind in one tensor
  a[0] = 3e-200, a[8192] = 4e-200, a[17000] = 5;
  b[17000] = 5;
  EXPECT_NEAR(between(a, b, DType::kF64).rms() * std::sqrt(18000) / 5e-200, 1, 1e-12);
  EXPECT_NEAR(between(a, b, DType::kF64).relative() / 1e-200, 1, 1e-12);
  a[1] = 3e200;
  EXPECT_NEAR(between(a, b, DType::kF64).rms() * std::sqrt(18000) / 3e200, 1, 1e-12);
  EXPECT_NEAR(between(a, b, DType::kF64).relative(), 1, 1e-12);
}

/// Between 2^53 and 2^64 float64 has every 2048th whole number alone.
TEST(Deviation, TellsWholeNumbersApartThatFloat64DoesNot) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const Deviation found = between(std::vector<int64_t>{kMost, kMost, -kMost - 1, 1},
                                  std::vector<int64_t>{kMost - 1, kMost, kMost, 1}, DType::kI64);
  EXPECT_EQ(found.differing, 2);
  EXPECT_EQ(found.most, 0x1p64);
  EXPECT_EQ(between(std::vector<int64_t>{kMost}, std::vector<int64_t>{kMost - 1}, DType::kI64).most, 1);
  EXPECT_EQ(
      between(std::vector<uint64_t>(9000, ~uint64_t{0}), std::vector<uint64_t>(9000, ~uint64_t{2}), DType::kU64).most,
      2);
  EXPECT_EQ(
      between(std::vector<uint64_t>(9000, ~uint64_t{0}), std::vector<uint64_t>(9000, ~uint64_t{2}), DType::kU64).rms(),
      2);
  std::vector<double> scratch(kScratch);
  const uint64_t whole[] = {~uint64_t{0}, (uint64_t{1} << 60) + 1};
  const double real[] = {0x1p64, 0x1p60};  // one more, and one less
  const Deviation mixed = deviation(reinterpret_cast<const std::byte*>(whole), DType::kU64,
                                    reinterpret_cast<const std::byte*>(real), DType::kF64, 2, scratch);
  EXPECT_EQ(mixed.differing, 2);
  EXPECT_EQ(mixed.most, 1);
}

/// By the OCP's definition (E4M3, E5M2, E8M0) and its variants without infinities and negative zero.
TEST(Deviation, KnowsTheFloatsOfEightBits) {
  struct Case {
    DType dtype;
    uint8_t bits;
    double value;
  };
  const double inf = std::numeric_limits<double>::infinity();
  for (const Case& one :
       {Case{DType::kF8E4M3, 0x7e, 448}, Case{DType::kF8E4M3, 0x01, std::ldexp(1, -9)}, Case{DType::kF8E4M3, 0xb8, -1},
        Case{DType::kF8E5M2, 0x7b, 57344}, Case{DType::kF8E5M2, 0x7c, inf},
        Case{DType::kF8E5M2, 0x01, std::ldexp(1, -16)}, Case{DType::kF8E4M3Fnuz, 0x7f, 240},
        Case{DType::kF8E4M3Fnuz, 0x40, 1}, Case{DType::kF8E5M2Fnuz, 0x7f, 57344}, Case{DType::kF8E5M2Fnuz, 0x40, 1},
        Case{DType::kF8E8M0, 127, 1}, Case{DType::kF8E8M0, 0, std::ldexp(1, -127)}}) {
    double value = 0;
    const std::byte bits{one.bits};
    to_doubles(&bits, one.dtype, &value, 1);
    EXPECT_EQ(value, one.value) << dtype_name(one.dtype) << " " << int(one.bits);
  }
  for (const Case& nan : {Case{DType::kF8E4M3, 0x7f, 0}, Case{DType::kF8E5M2, 0x7d, 0},
                          Case{DType::kF8E4M3Fnuz, 0x80, 0}, Case{DType::kF8E8M0, 255, 0}}) {
    double value = 0;
    const std::byte bits{nan.bits};
    to_doubles(&bits, nan.dtype, &value, 1);
    EXPECT_TRUE(std::isnan(value));
  }
}

}  // namespace
}  // namespace shardow::cli
