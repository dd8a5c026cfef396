// Averages of any size and number lie apart, modulo the period in which their streams disturb one another.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "average/chunk_table.h"

namespace shardow::average {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(ArenaStride, HoldsAnAverageAndKeepsItAligned) {
  for (const int64_t bytes :
       std::vector<int64_t>{0, 64, kMiB - 64, kMiB, 3 * kMiB + 64, 340224000, 64 * kMiB, 5000 * kMiB}) {
    for (int count = 1; count <= 8; ++count) {
      const int64_t stride = arena_stride(bytes, count);
      EXPECT_GE(stride, bytes);
      EXPECT_LT(stride, bytes + 64 * kMiB);
      EXPECT_EQ(stride % 64, 0);
    }
  }
}

TEST(ArenaStride, SpreadsLargeAveragesOverThePeriod) {
  for (int count = 2; count <= 8; ++count) {
    const int64_t stride = arena_stride(340 * kMiB + 448, count);
    for (int other = 1; other < count; ++other) {
      const int64_t apart = other * stride % (64 * kMiB);
      EXPECT_GE(std::min(apart, 64 * kMiB - apart), 64 * kMiB / count - 1024)
          << count << " averages, " << other << " apart";
    }
  }
}

TEST(ArenaStride, PacksWhatStaysInCaches) {
  EXPECT_EQ(arena_stride(kMiB - 64, 8), kMiB - 64);
  EXPECT_EQ(arena_stride(1000 * kMiB, 1), 1000 * kMiB);
}

}  // namespace
}  // namespace shardow::average
