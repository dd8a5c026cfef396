// Every instruction set against the reference, bit for bit; and the reference against exact arithmetic.
#include "kernels/sums.h"

#include <gtest/gtest.h>

#include "hwy/highway.h"
#include "kernels/test_data.h"

namespace shardow::kernels::testing {
namespace {

class Sums : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

INSTANTIATE_TEST_SUITE_P(Targets, Sums, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return std::string(hwy::TargetName(target.param)); });

/// Values that rounding trips over: ties and their neighbours, subnormals of every format, the largest, what is no
/// number.
double awkward(Random& random) {
  const double edges[] = {0.0,      -0.0,      1.0 + 0x1p-8, 1.0 + 0x1p-11, 0x1p-133,       0x1.8p-134, 0x1p-134,
                          0x1p-25,  0x1.8p-25, 65520.0,      0x1.ffp127,    0x1.fffffep127, 0x1p128,    0x1p-149,
                          0x1p-150, 0x1p-1074, 0x1p-126,     INFINITY,      -INFINITY,      NAN};
  const double x = edges[random() % std::size(edges)] * (random() % 2 == 0 ? 1 : -1);
  return random() % 2 == 0 ? x : std::nextafter(x, random() % 2 == 0 ? INFINITY : -INFINITY);
}

TEST_P(Sums, AreRoundedAsTheReferenceRoundsAtEveryLengthAndOffset) {
  Random random(1);
  for (const DType dtype : kDTypes) {
    for (int round = 0; round < 400; ++round) {
      const auto count = static_cast<int64_t>(random() % 70);
      std::vector<double> sums(static_cast<size_t>(count));
      for (double& one : sums)
        one = random() % 8 == 0 ? double_of(random())
              : random() % 2 == 0
                  ? awkward(random)
                  : std::ldexp(1.0 + static_cast<double>(random() % 5000) / 4096, static_cast<int>(random() % 8));
      Buffer expected(static_cast<size_t>(count) * size_of(dtype), random() % 8 * size_of(dtype)), actual = expected;
      const double largest = reference::round_sums(sums.data(), expected.data(), dtype, count);
      ASSERT_EQ(cpu::round_sums(sums.data(), actual.data(), dtype, count), largest) << name_of(dtype) << ", " << count;
      ASSERT_TRUE(actual == expected) << name_of(dtype) << ", " << count;
    }
  }
}

TEST_P(Sums, AddTermsAsTheReferenceDoes) {
  Random random(2);
  for (const DType dtype : kDTypes) {
    for (int round = 0; round < 200; ++round) {
      const auto count = static_cast<int64_t>(random() % 70);
      std::vector<Buffer> data;
      std::vector<Term> terms;
      for (size_t t = 0; t < 1 + random() % kMostTerms; ++t) {
        Buffer& one = data.emplace_back(static_cast<size_t>(count) * size_of(dtype), random() % 8 * size_of(dtype));
        std::vector<double> values(static_cast<size_t>(count));
        for (double& x : values)
          x = std::ldexp(static_cast<double>(random() % 1000) - 500, static_cast<int>(random() % 20) - 20);
        reference::cast(values.data(), DType::kF64, one.data(), dtype, count);
      }
      for (Buffer& one : data) terms.push_back({one.data(), 1.0 / static_cast<double>(3 + random() % 9)});
      for (const bool first : {true, false}) {
        Buffer expected(static_cast<size_t>(count) * 8, random() % 4 * 8);
        for (int64_t i = 0; i < count; ++i) reinterpret_cast<double*>(expected.data())[i] = static_cast<double>(i) / 3;
        Buffer actual = expected;
        reference::add_terms(terms, dtype, first, reinterpret_cast<double*>(expected.data()), count);
        cpu::add_terms(terms, dtype, first, reinterpret_cast<double*>(actual.data()), count);
        ASSERT_TRUE(actual == expected) << name_of(dtype) << ", " << count << ", " << terms.size();
      }
    }
  }
}

TEST(SumsReference, RoundsOnceWhereTwoRoundingsWouldDiffer) {
  const double sums[] = {1.0 + 0x1p-8 + 0x1p-40, 1.0 + 0x1p-8 - 0x1p-40,
                         0x1p-134 + 0x1p-170};  // a float lies on the tie, the sum beside it
  BF16 rounded[3];
  reference::round_sums(sums, rounded, DType::kBF16, 3);
  EXPECT_EQ(to_float(rounded[0]), 1.0f + 0x1p-7f);
  EXPECT_EQ(to_float(rounded[1]), 1.0f);
  EXPECT_EQ(to_float(rounded[2]), 0x1p-133f);
}

TEST(SumsReference, SaysTheLargestThatIsANumber) {
  const double sums[] = {-70000.0, 3.0, INFINITY, NAN, -INFINITY};
  F16 rounded[5];
  EXPECT_EQ(reference::round_sums(sums, rounded, DType::kF16, 5), 70000.0);
  EXPECT_EQ(reference::round_sums(sums + 2, rounded, DType::kF16, 3), 0.0);
  EXPECT_EQ(reference::round_sums(sums, rounded, DType::kF16, 0), 0.0);
}

TEST(SumsReference, FusesAndKeepsTheSignOfAZero) {
  const double x = 1.0 + 0x1p-52;
  double sum = -1.0;
  const Term term{&x, 1.0 - 0x1p-53};
  reference::add_terms({&term, 1}, DType::kF64, false, &sum, 1);
  EXPECT_EQ(sum, 0x1p-53 - 0x1p-105);  // (1 + 2e)(1 - e) - 1
  const float zero = -0.0f;
  const Term one{&zero, 1.0};
  reference::add_terms({&one, 1}, DType::kF32, true, &sum, 1);
  EXPECT_TRUE(std::signbit(sum));
}

}  // namespace
}  // namespace shardow::kernels::testing
