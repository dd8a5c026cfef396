// WorkShares: a chunk table divided among threads, each of which keeps its part, so that memory stays with the core
// that touched it first; one that is done takes over what another has not begun, so that a thread which got no
// processor delays no other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace shardow::average {

/// Chunks [begin, end) of the table.
struct ChunkRange {
  size_t begin, end;
  bool operator==(const ChunkRange&) const = default;
};

class WorkShares {
 public:
  /// Makes `num_threads` contiguous shares of nearly equal elements, in blocks of about kChunkElements. The same chunks
  /// always give the same shares. `first`: the index of chunks[0] in the table to which the ranges of take() refer.
  WorkShares(std::span<const kernels::Chunk> chunks, int num_threads, size_t first = 0);

  /// Makes all blocks available again. Call it before the threads start.
  void begin() noexcept;

  /// Returns the next block for this thread: from the front of its share, then from the back of others'; nothing when
  /// all are taken. Each chunk is in exactly one result between two calls of begin(). Any threads may call it at once.
  std::optional<ChunkRange> take(int thread) noexcept;

  size_t num_threads() const noexcept { return left_.size(); }
  size_t bytes() const noexcept;

 private:
  /// Blocks [low word, high word) are not taken yet.
  struct alignas(64) Left {
    std::atomic<uint64_t> range;
  };

  std::optional<ChunkRange> take_from(size_t share, bool front) noexcept;

  std::vector<size_t> blocks_;    // the first chunk of each, and the end of the last
  std::vector<uint32_t> bounds_;  // blocks of share i: [bounds_[i], bounds_[i + 1])
  std::vector<Left> left_;        // of each share
};

}  // namespace shardow::average
