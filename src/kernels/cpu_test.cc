// Every instruction set that this processor has, against the reference: equal, not close.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "hwy/highway.h"
#include "kernels/kernels.h"
#include "kernels/test_data.h"
#include "roofline.h"

namespace shardow::kernels::testing {
namespace {

/// Runs each test with one instruction set, as if the processor had no other.
class Cpu : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

INSTANTIATE_TEST_SUITE_P(Targets, Cpu, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return std::string(hwy::TargetName(target.param)); });

void expect_equals_reference(const Problem& problem, const Step& step) {
  Problem expected = problem, actual = problem;
  const Chunk of_expected = expected.chunk(), of_actual = actual.chunk();
  const Tally wanted = reference::update({&of_expected, 1}, step);
  const Tally tally = cpu::update({&of_actual, 1}, step);
  EXPECT_TRUE(actual == expected) << describe(problem, step);
  EXPECT_EQ(tally.non_finite, wanted.non_finite) << describe(problem, step);
  EXPECT_EQ(tally.first_chunk, wanted.first_chunk) << describe(problem, step);
}

TEST_P(Cpu, UsesTheTargetThatIsForced) {
  const std::string target = cpu::target();
  EXPECT_TRUE(target == hwy::TargetName(GetParam()) || target == "reference") << target;
}

TEST_P(Cpu, UpdateEqualsReferenceAtEveryLengthAndOffset) {
  Random random(1);
  for (const Pair& pair : all_pairs()) {
    for (int64_t count = 0; count <= 4 * 16 + 3; ++count) {
      for (size_t offsets = 0; offsets < 64; ++offsets) {
        const int num_averages = static_cast<int>(random() % 3) + 1;
        const auto values = random() % 8 == 0 ? Values::kFewNotFinite : Values::kFinite;
        const Problem problem(pair.first, pair.second, num_averages, count, offsets % 8, offsets / 8, values, random);
        expect_equals_reference(problem, random_step(pair.second, num_averages, offsets % 2 == 0, random));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Cpu, UpdateEqualsReferenceForEveryFormAndNumberOfAverages) {
  Random random(2);
  for (const Pair& pair : all_pairs()) {
    for (const Form form : kForms) {
      for (const double weight : {1e-6, 1e-3, 0.3, 0.5, 0.9}) {
        for (const int num_averages : {1, 2, 3, 8}) {
          for (const bool hold : {false, true}) {
            Step step = make_step(num_averages, hold, random);
            step.averages.fill(one(form, weight));
            for (const Values values : {Values::kFinite, Values::kFewNotFinite, Values::kAnyBits}) {
              expect_equals_reference(
                  Problem(pair.first, pair.second, num_averages, 333, random() % 8, random() % 8, values, random),
                  step);
            }
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(Cpu, UpdateEqualsReferenceOnLongChunks) {
  Random random(3);
  for (const Pair& pair : all_pairs()) {
    for (const int64_t count : {1000, 4097, 65536}) {
      expect_equals_reference(Problem(pair.first, pair.second, 2, count, 1, 3, Values::kFewNotFinite, random),
                              random_step(pair.second, 2, true, random));
    }
  }
}

TEST_P(Cpu, NoiseDoesNotDependOnHowARangeIsCut) {
  Random random(4);
  for (const DType average : kDTypes) {
    const Problem problem(DType::kBF16, average, 2, 1537, 3, 1, Values::kFinite, random);
    Step step = make_step(2, true, random);
    step.averages.fill(one(Form::kStochastic, 1e-5));
    Problem whole = problem, cut = problem;
    const Chunk chunk = whole.chunk();
    static_cast<void>(cpu::update({&chunk, 1}, step));
    for (int64_t begin = 0, length; begin < problem.count; begin += length) {
      length = std::min<int64_t>(1 + static_cast<int64_t>(random() % 97), problem.count - begin);
      Chunk piece = cut.chunk();
      piece.parameter = static_cast<const std::byte*>(piece.parameter) + begin * 2;
      for (size_t k = 0; k < 2; ++k)
        piece.averages[k] = static_cast<std::byte*>(piece.averages[k]) + static_cast<size_t>(begin) * size_of(average);
      piece.count = length;
      piece.global_begin += begin;
      static_cast<void>(cpu::update({&piece, 1}, step));
    }
    EXPECT_TRUE(cut == whole) << name_of(average);
    EXPECT_FALSE(whole == problem) << "the update changed nothing, so this test shows nothing";
  }
}

TEST_P(Cpu, HeldElementsKeepEveryBitAndAreCounted) {
  for (const DType average : kDTypes) {
    for (const bool hold : {true, false}) {
      Random random(5);
      Problem problem(DType::kF32, average, 1, 200, 0, 0, Values::kFinite, random);
      const float bad[] = {std::nanf(""), HUGE_VALF, -HUGE_VALF};
      std::vector<size_t> places = {0, 1, 15, 16, 63, 64, 77, 128, 198, 199};
      for (size_t i = 0; i < places.size(); ++i) std::memcpy(problem.parameter.data() + places[i] * 4, &bad[i % 3], 4);
      // The averages there are signalling NaNs, which any conversion would change.
      const uint64_t signalling = average == DType::kF64   ? 0x7ff0000000000001u
                                  : average == DType::kF32 ? 0x7f800001u
                                  : average == DType::kF16 ? 0x7c01u
                                                           : 0x7f81u;
      const size_t size = size_of(average);
      for (const size_t place : places) std::memcpy(problem.averages[0].data() + place * size, &signalling, size);
      Step step = make_step(1, hold, random);
      step.averages[0] = one(Form::kStochastic, 0.01);
      const Chunk chunk = problem.chunk();
      const Tally tally = cpu::update({&chunk, 1}, step);
      EXPECT_EQ(tally.non_finite, 10);
      for (const size_t place : places) {
        EXPECT_EQ(std::memcmp(problem.averages[0].data() + place * size, &signalling, size) == 0, hold)
            << name_of(average) << " at " << place;
      }
    }
  }
}

TEST_P(Cpu, TallyNamesTheFirstChunk) {
  Random random(6);
  std::vector<Problem> problems;
  for (int i = 0; i < 6; ++i)
    problems.emplace_back(i % 2 == 0 ? DType::kF32 : DType::kF16, DType::kF32, 1, 100, 0, 0, Values::kFinite, random);
  const float infinity = HUGE_VALF;
  const uint16_t half_nan = 0x7e00;
  std::memcpy(problems[3].parameter.data() + 20, &half_nan, 2);
  std::memcpy(problems[4].parameter.data() + 20, &infinity, 4);
  std::vector<Chunk> chunks;
  for (Problem& problem : problems) chunks.push_back(problem.chunk());
  const Step step = random_step(DType::kF32, 1, true, random);
  const Tally all = cpu::update(chunks, step), none = cpu::update(std::span(chunks).first(3), step);
  EXPECT_EQ(all.non_finite, 2);
  EXPECT_EQ(all.first_chunk, 3);
  EXPECT_EQ(none.non_finite, 0);
  EXPECT_EQ(none.first_chunk, -1);
}

TEST_P(Cpu, SwapEqualsReferenceAndIsUndone) {
  Random random(7);
  for (const Pair& pair : all_pairs()) {
    if (!swaps_in_place(pair.first, pair.second)) continue;
    for (int64_t count = 0; count <= 100; ++count) {
      const Problem problem(pair.first, pair.second, 1, count, random() % 8, random() % 8, Values::kAnyBits, random);
      Problem expected = problem, actual = problem;
      reference::swap(expected.parameter.data(), pair.first, expected.averages[0].data(), pair.second, count,
                      Direction::kIn);
      cpu::swap(actual.parameter.data(), pair.first, actual.averages[0].data(), pair.second, count, Direction::kIn);
      ASSERT_TRUE(actual == expected) << pair << ", " << count;
      cpu::swap(actual.parameter.data(), pair.first, actual.averages[0].data(), pair.second, count, Direction::kOut);
      ASSERT_TRUE(actual == problem) << pair << ", " << count;
    }
  }
}

TEST_P(Cpu, SwapOfBf16WithF32EqualsReferenceForEveryUpperHalf) {
  for (const uint32_t lo : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
    std::vector<uint32_t> averages(0x10000);
    std::vector<uint16_t> parameters(0x10000);
    for (uint32_t hi = 0; hi < 0x10000; ++hi) {
      averages[hi] = hi << 16 | lo;
      parameters[hi] = static_cast<uint16_t>(hi * 40503u);
    }
    for (const Direction direction : {Direction::kIn, Direction::kOut}) {
      auto wanted_averages = averages;
      auto wanted_parameters = parameters;
      reference::swap(wanted_parameters.data(), DType::kBF16, wanted_averages.data(), DType::kF32, 0x10000, direction);
      cpu::swap(parameters.data(), DType::kBF16, averages.data(), DType::kF32, 0x10000, direction);
      ASSERT_TRUE(parameters == wanted_parameters && averages == wanted_averages) << lo;
    }
  }
}

TEST_P(Cpu, CastEqualsReference) {
  Random random(8);
  for (const Pair& pair : all_pairs()) {
    for (int64_t count = 0; count <= 200; ++count) {
      const Values values = count % 2 == 0 ? Values::kFinite : Values::kAnyBits;
      const Problem problem(pair.first, pair.second, 1, count, random() % 8, random() % 8, values, random);
      Problem expected = problem, actual = problem;
      reference::cast(expected.parameter.data(), pair.first, expected.averages[0].data(), pair.second, count);
      cpu::cast(actual.parameter.data(), pair.first, actual.averages[0].data(), pair.second, count);
      ASSERT_TRUE(actual == expected) << pair << ", " << count;
    }
  }
}

TEST_P(Cpu, CastRoundsEveryFloatAroundEvery16BitValueAsTheReference) {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0x0fffu, 0x1000u, 0x1001u})
      values.push_back(float_of(bits << 16 | lower));
    values.push_back(to_float(F16{static_cast<uint16_t>(bits)}));
  }
  for (const DType to : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> expected(values.size()), actual(values.size());
    reference::cast(values.data(), DType::kF32, expected.data(), to, static_cast<int64_t>(values.size()));
    cpu::cast(values.data(), DType::kF32, actual.data(), to, static_cast<int64_t>(values.size()));
    EXPECT_TRUE(actual == expected) << name_of(to);
  }
}

TEST_P(Cpu, TheLimitTouchesEveryElement) {
  Random random(9);
  for (int64_t count = 0; count <= 100; ++count) {
    Problem problem(DType::kF32, DType::kF32, 3, count, random() % 8, random() % 8, Values::kFinite, random);
    std::memset(problem.averages[0].data(), 0, problem.averages[0].bytes());
    const Problem before = problem;
    const Chunk chunk = problem.chunk();
    roofline::update({&chunk, 1}, 1);
    for (int64_t i = 0; i < count; ++i) {
      const float p = static_cast<const float*>(chunk.parameter)[i];
      ASSERT_EQ(static_cast<const float*>(chunk.averages[0])[i], p > 0 ? p : 0) << i << " of " << count;
    }
    ASSERT_TRUE(problem.averages[1] == before.averages[1] && problem.parameter == before.parameter);
  }
}

TEST(Kernels, OnlySomePairsSwapInPlace) {
  for (const Pair& pair : all_pairs()) {
    EXPECT_EQ(swaps_in_place(pair.first, pair.second),
              pair.first == pair.second || (pair.first == DType::kBF16 && pair.second == DType::kF32))
        << pair;
  }
  EXPECT_FALSE(swaps_in_place(DType::kI64, DType::kI64));
  EXPECT_FALSE(is_averaged_dtype(DType::kF8E4M3));
}

}  // namespace
}  // namespace shardow::kernels::testing
