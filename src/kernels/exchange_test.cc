#include "kernels/exchange.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace shardow::kernels {
namespace {

TEST(Exchange, IsUndoneForEveryUpperHalf) {
  for (const uint32_t lo : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
    std::vector<bool> seen(0x10000);
    for (uint32_t hi = 0; hi < 0x10000; ++hi) {
      uint16_t parameter = 0x1234;
      uint32_t average = hi << 16 | lo;
      exchange(parameter, average, Direction::kIn);
      ASSERT_FALSE(seen[parameter]) << "two averages give the weights " << parameter << " with lower half " << lo;
      seen[parameter] = true;
      exchange(parameter, average, Direction::kOut);
      ASSERT_EQ(parameter, 0x1234);
      ASSERT_EQ(average, hi << 16 | lo);
    }
  }
}

TEST(Exchange, IsUndoneForRandomBits) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000000; ++i) {
    const auto parameter = static_cast<uint16_t>(random());
    const auto average = static_cast<uint32_t>(random());
    uint16_t p = parameter;
    uint32_t e = average;
    exchange(p, e, Direction::kIn);
    exchange(p, e, Direction::kOut);
    ASSERT_EQ(p, parameter);
    ASSERT_EQ(e, average);
  }
}

TEST(Exchange, ShowsTheWeightsTheNearestBf16) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 1000000; ++i) {
    const float average = float_of(static_cast<uint32_t>(random()));
    if (!is_finite(average)) continue;
    uint16_t parameter = 0;
    uint32_t slot = bits_of(average);
    exchange(parameter, slot, Direction::kIn);
    const bool tie = (bits_of(average) & 0xffff) == 0x8000;
    const uint16_t nearest = to_bf16(average).bits;
    const uint16_t away = static_cast<uint16_t>((bits_of(average) >> 16) + 1);
    ASSERT_EQ(parameter, tie ? away : nearest) << average;
  }
}

TEST(Exchange, KeepsInfinityAndQuietNan) {
  for (const uint32_t average : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc0ffffu}) {
    uint16_t parameter = 0;
    uint32_t slot = average;
    exchange(parameter, slot, Direction::kIn);
    EXPECT_EQ(parameter, average >> 16);
  }
}

}  // namespace
}  // namespace shardow::kernels
