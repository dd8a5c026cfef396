// Each chunk is taken once, by whichever thread.
#include "average/work_shares.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "average/chunk_table.h"

namespace shardow::average {
namespace {

std::vector<kernels::Chunk> chunks_of(const std::vector<int64_t>& counts) {
  std::vector<kernels::Chunk> chunks(counts.size());
  for (size_t i = 0; i < counts.size(); ++i) chunks[i].count = counts[i];
  return chunks;
}

std::vector<int> taken(WorkShares& shares, size_t num_chunks, const std::vector<int>& order) {
  std::vector<int> times(num_chunks);
  for (const int thread : order) {
    if (const auto block = shares.take(thread)) {
      for (size_t c = block->begin; c < block->end; ++c) ++times[c];
    }
  }
  return times;
}

TEST(WorkShares, EveryChunkIsTakenOnceWhoeverComes) {
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < 500; ++i) counts.push_back(i % 7 == 0 ? kChunkElements : i * 13 % 3000);
  const std::vector<kernels::Chunk> chunks = chunks_of(counts);
  for (const int threads : {1, 2, 3, 8}) {
    WorkShares shares(chunks, threads);
    const std::vector<int> once(chunks.size(), 1);
    std::vector<int> last_alone(1000, threads - 1), in_turn;
    for (int i = 0; i < 1000; ++i) in_turn.push_back(i % threads);
    EXPECT_EQ(taken(shares, chunks.size(), last_alone), once) << threads;
    EXPECT_FALSE(shares.take(0));
    shares.begin();
    EXPECT_EQ(taken(shares, chunks.size(), in_turn), once) << threads;
  }
}

TEST(WorkShares, AThreadBeginsWithItsOwnShareAndEndsWithTheBackOfOthers) {
  const std::vector<kernels::Chunk> chunks = chunks_of(std::vector<int64_t>(8, kChunkElements));
  WorkShares shares(chunks, 2);
  EXPECT_EQ(shares.take(1), (ChunkRange{4, 5}));
  EXPECT_EQ(shares.take(0), (ChunkRange{0, 1}));
  for (size_t c = 5; c < 8; ++c) EXPECT_EQ(shares.take(1), (ChunkRange{c, c + 1}));
  EXPECT_EQ(shares.take(1), (ChunkRange{3, 4}));
  EXPECT_EQ(shares.take(0), (ChunkRange{1, 2}));
}

TEST(WorkShares, NothingIsNobodys) {
  WorkShares shares({}, 3);
  EXPECT_FALSE(shares.take(2));
}

TEST(WorkShares, ManyThreadsTakeEachChunkOnce) {
  constexpr int kThreads = 4;
  const std::vector<kernels::Chunk> chunks = chunks_of(std::vector<int64_t>(4000, kChunkElements));
  WorkShares shares(chunks, kThreads);
  std::vector<std::atomic<int>> times(chunks.size());
  std::vector<std::thread> workers;
  for (int i = 0; i < kThreads; ++i) {
    workers.emplace_back([&, i] {
      while (const auto block = shares.take(i)) {
        for (size_t c = block->begin; c < block->end; ++c) ++times[c];
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const auto& count : times) ASSERT_EQ(count.load(), 1);
}

}  // namespace
}  // namespace shardow::average
