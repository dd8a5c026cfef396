// WorkShares: a chunk table divided among threads, each of which keeps its part, so that memory stays with the core
// that touched it first; one that is done takes over what another has not begun, so that a thread which got no
// processor holds nobody up.
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
  /// `num_threads` contiguous shares of nearly equal elements, in blocks of about kChunkElements; the same chunks
  /// always give the same. `first`: the place of chunks[0] in the table that answers speak of.
  WorkShares(std::span<const kernels::Chunk> chunks, int num_threads, size_t first = 0);

  /// All is to be done again. Before the threads start.
  void begin() noexcept;

  /// The next block for this thread: of its own share from the front, then of others' from the back; nothing when all
  /// is taken. Each chunk is in exactly one answer between two calls of begin(). Any threads at once.
  std::optional<ChunkRange> take(int thread) noexcept;

  size_t num_threads() const noexcept { return left_.size(); }
  size_t bytes() const noexcept;

 private:
  /// Blocks [low word, high word) are not taken yet.
  struct alignas(64) Left {
    std::atomic<uint64_t> range;
  };

  std::optional<ChunkRange> take_from(size_t share, bool front) noexcept;

  std::vector<size_t> blocks_;    // where each begins, and the end of the last
  std::vector<uint32_t> bounds_;  // blocks of share i: [bounds_[i], bounds_[i + 1])
  std::vector<Left> left_;        // of each share
};

}  // namespace shardow::average
