// A share is one atomic word with two ends: its owner takes blocks from the low one, others from the high one.
#include "average/work_shares.h"

#include "average/chunk_table.h"

namespace shardow::average {
namespace {

uint64_t range(uint64_t begin, uint64_t end) {
  return end << 32 | begin;
}

}  // namespace

WorkShares::WorkShares(std::span<const kernels::Chunk> chunks, int num_threads, size_t first)
    : left_(static_cast<size_t>(num_threads)) {
  const std::vector<size_t> shares = partition(chunks, num_threads);
  for (size_t share = 0; share < left_.size(); ++share) {
    bounds_.push_back(static_cast<uint32_t>(blocks_.size()));
    int64_t elements = kChunkElements;
    for (size_t c = shares[share]; c < shares[share + 1]; ++c) {
      // A single thread needs no blocks.
      if (elements >= kChunkElements && (num_threads > 1 || c == 0)) {
        blocks_.push_back(first + c);
        elements = 0;
      }
      elements += chunks[c].count;
    }
  }
  bounds_.push_back(static_cast<uint32_t>(blocks_.size()));
  blocks_.push_back(first + chunks.size());
  begin();
}

void WorkShares::begin() noexcept {
  for (size_t share = 0; share < left_.size(); ++share) {
    left_[share].range.store(range(bounds_[share], bounds_[share + 1]), std::memory_order_relaxed);
  }
}

std::optional<ChunkRange> WorkShares::take(int thread) noexcept {
  const auto own = static_cast<size_t>(thread);
  if (const auto block = take_from(own, true)) return block;
  for (size_t i = 1; i < left_.size(); ++i) {
    if (const auto block = take_from((own + i) % left_.size(), false)) return block;
  }
  return std::nullopt;
}

std::optional<ChunkRange> WorkShares::take_from(size_t share, bool front) noexcept {
  std::atomic<uint64_t>& left = left_[share].range;
  for (uint64_t seen = left.load(std::memory_order_relaxed);;) {
    const uint64_t begin = seen & 0xffffffff, end = seen >> 32;
    if (begin == end) return std::nullopt;
    // Relaxed, since it publishes no memory: a block's data was there before the threads started.
    if (!left.compare_exchange_weak(seen, front ? range(begin + 1, end) : range(begin, end - 1),
                                    std::memory_order_relaxed))
      continue;
    const size_t block = front ? begin : end - 1;
    return ChunkRange{blocks_[block], blocks_[block + 1]};
  }
}

size_t WorkShares::bytes() const noexcept {
  return blocks_.capacity() * sizeof(size_t) + bounds_.capacity() * sizeof(uint32_t) + left_.capacity() * sizeof(Left);
}

}  // namespace shardow::average
