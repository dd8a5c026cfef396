// Averages on the host of weights on a device are those of weights on the host, bit for bit, whatever is called.
#include <gtest/gtest.h>

#include <filesystem>

#include "offload_fixture.h"

namespace shardow {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

TEST(Offload, EqualsResidentAveragesForEveryDTypeRuleDecayAndRing) {
  int cases = 0;
  for (const DType dtype : kDTypes) {
    for (const DType of_averages : kDTypes) {
      const bool narrow = of_averages == DType::kBF16 || of_averages == DType::kF16;
      for (const Rule rule : {Rule::kLerp, Rule::kMulAdd, Rule::kTwoProducts, Rule::kDifference, Rule::kFusedDifference,
                              Rule::kQuotient}) {
        if (narrow && rule != Rule::kLerp) continue;
        for (const size_t num_decays : {1, 3}) {
          for (const int64_t ring_bytes : kRings) {
            fake::reset({.num_devices = 2, .seed = static_cast<uint64_t>(++cases), .log = false});
            AverageOptions options = options_of(num_decays, ring_bytes);
            options.dtype = of_averages;
            options.rule = rule;
            if (narrow) options.rounding = Rounding::kStochastic;
            Twins twins(model(dtype, 2), options);
            for (int i = 0; i < 3; ++i) {
              twins.step();
              twins.update();
            }
            twins.expect_equal(std::string(dtype_name(dtype)) + " averaged as " + std::string(dtype_name(of_averages)) +
                               ", ring of " + std::to_string(ring_bytes));
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Offload, SwapsBitForBitBothWays) {
  int cases = 0;
  for (const DType dtype : kDTypes) {
    for (const DType of_averages : {DType::kF32, DType::kF64}) {
      for (const int64_t ring_bytes : kRings) {
        fake::reset({.num_devices = 2, .seed = static_cast<uint64_t>(++cases), .log = false});
        AverageOptions options = options_of(2, ring_bytes);
        options.dtype = of_averages;
        Twins twins(model(dtype, 2), options);
        for (int i = 0; i < 2; ++i) {
          twins.step();
          twins.update();
          twins.step();
          twins.offloaded->swap_in(1);
          twins.resident->swap_in(1);
          twins.expect_equal_weights("swapped in");
          twins.offloaded->swap_out();
          twins.resident->swap_out();
          twins.expect_equal("swapped out");
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Offload, CopiesTheWeightsBytesAndNothingElse) {
  for (const int64_t ring_bytes : kRings) {
    fake::reset({.num_devices = 2, .seed = 5});
    Twins twins(model(DType::kBF16, 2), options_of(3, ring_bytes));
    const auto before = fake::copied();
    for (int i = 1; i <= 4; ++i) {
      twins.step();
      twins.update();
      EXPECT_EQ(twins.offloaded->stats().offload_bytes, i * twins.weight_bytes());
    }
    EXPECT_EQ(fake::copied().to_host - before.to_host, 4 * twins.weight_bytes());
    EXPECT_EQ(fake::copied().to_device, before.to_device);
  }
}

TEST(Offload, NamesTheTensorOnTheDeviceThatIsNotFinite) {
  for (const int64_t ring_bytes : kRings) {
    for (const NonFinite mode : {NonFinite::kHold, NonFinite::kPropagate, NonFinite::kRaise}) {
      fake::reset({.seed = 3, .log = false});
      AverageOptions options = options_of(1, ring_bytes);
      options.non_finite = mode;
      Twins twins(model(DType::kF32), options);
      twins.step();
      twins.poison(5, 60);
      twins.poison(3, 1200);
      twins.poison(3, 1201);
      twins.offloaded->update();
      const std::string said = error_of([&] { twins.offloaded->wait(); }),
                        wanted = error_of([&] { twins.resident->update(); });
      EXPECT_EQ(said, wanted);
      EXPECT_EQ(said.empty(), mode != NonFinite::kRaise);
      twins.expect_equal();
      const auto found = twins.offloaded->non_finite(), expected = twins.resident->non_finite();
      ASSERT_EQ(found.has_value(), expected.has_value());
      if (!found) continue;
      EXPECT_EQ(found->tensor, "p3");
      EXPECT_EQ(found->elements, 3);
      EXPECT_EQ(expected->tensor, "p3");
    }
  }
}

TEST(Offload, FollowsMemoryThatMoves) {
  fake::reset({.num_devices = 2, .seed = 4, .log = false});
  Twins twins(model(DType::kBF16, 2), options_of(2, 4096));
  for (int i = 0; i < 4; ++i) {
    twins.step();
    twins.update();
    twins.move();
    twins.expect_equal();
    twins.offloaded->swap_in();
    twins.resident->swap_in();
    twins.expect_equal_weights();
    twins.offloaded->swap_out();
    twins.resident->swap_out();
  }
  EXPECT_EQ(twins.offloaded->stats().offload_bytes, 4 * twins.weight_bytes());
}

TEST(Offload, OneAverageMayHaveSomeOfItsWeightsAndAveragesAnywhere) {
  for (const int64_t ring_bytes : kRings) {
    fake::reset({.num_devices = 2, .seed = 9, .log = false});
    Twins twins(model(DType::kBF16, 2), options_of(2, ring_bytes), 1, {.on_host = {0, 3}, .beside = {1, 4, 7}});
    for (int i = 0; i < 3; ++i) {
      twins.step();
      twins.update();
      twins.expect_equal_through_a_swap(1);
    }
  }
}

TEST(Offload, WeightsOfAnotherDTypeThanTheirMastersSwap) {
  for (const DType dtype : {DType::kBF16, DType::kF64}) {
    fake::reset({.seed = 2, .log = false});
    Twins masters(model(DType::kF32), options_of(1, 4096)), weights(model(dtype), options_of(1, 4096), 8);
    masters.step();
    masters.update();
    masters.offloaded->swap_in(weights.there());
    masters.resident->swap_in(weights.here());
    weights.expect_equal_weights("swapped in");
    masters.offloaded->swap_out();
    masters.resident->swap_out();
    weights.expect_equal("swapped out");
    masters.expect_equal();
  }
}

TEST(Offload, ResetsAndRestarts) {
  for (const int64_t ring_bytes : kRings) {
    fake::reset({.num_devices = 2, .seed = 6, .log = false});
    Twins twins(model(DType::kF16, 2), options_of(2, ring_bytes));
    twins.step();
    twins.update();
    twins.step();
    twins.offloaded->reset();
    twins.resident->reset();
    twins.expect_equal("reset");
    twins.step();
    twins.update();
    average::Driver::restart(*twins.offloaded);
    average::Driver::restart(*twins.resident);
    twins.expect_equal("restarted");
    EXPECT_EQ(twins.offloaded->state(), twins.resident->state());
  }
}

TEST(Offload, HoldsItsMemoryEventsThreadsAndDescriptorsOver10000Updates) {
  const auto entries = [](const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
  };
  fake::reset(fake::Options{});
  AverageOptions options = options_of(2, 8192);
  Twins twins(model(DType::kF32), options);
  const auto updates = [&](int count) {
    for (int i = 0; i < count; ++i) {
      twins.offloaded->update();
      twins.offloaded->finish_reading();
    }
    twins.offloaded->wait();
  };
  updates(10);
  fake::clear();
  const auto threads = entries("/proc/self/task"), descriptors = entries("/proc/self/fd");
  const size_t allocated = fake::allocated();
  updates(100);
  const size_t calls = fake::calls().size();
  for (const char* made : {"event that sleeps", "event that spins", "stream", "pin", "malloc"})
    EXPECT_TRUE(fake::calls_of(made).empty()) << made;
  EXPECT_GT(calls, 0U);
  fake::clear();
  for (int i = 0; i < 100; ++i) {
    updates(99);
    fake::clear();
  }
  EXPECT_EQ(fake::allocated(), allocated);
  EXPECT_EQ(entries("/proc/self/task"), threads);
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
}

TEST(Offload, RefusesWhatDoesNotFit) {
  fake::reset({.num_devices = 2});
  AverageOptions options = options_of(1, 100);
  EXPECT_NE(error_of([&] { Twins(model(DType::kF32), options); }).find("ring_bytes is 100; it must be at least 4096"),
            std::string::npos);
  options = options_of(1, 4096);
  options.overlap = true;
  Twins overlapped(model(DType::kF32), options);
  overlapped.step();
  overlapped.update();
  overlapped.expect_equal("with overlap");
}

}  // namespace
}  // namespace shardow
