// HostTable: a chunk table that threads of the host work through. Its weights are in host memory, or come through a
// ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "average/chunk_table.h"
#include "average/work_shares.h"
#include "base/threads.h"
#include "kernels/kernels.h"

namespace shardow::average {

/// Counts parameter elements that were NaN or Inf.
struct alignas(64) NonFiniteCount {
  int64_t elements = 0;
  uint64_t tensor = 0;  ///< hash_name() of the first that has one, if any
  size_t block = 0;     ///< its block, so that the first of all does not depend on which thread took which block

  void add(const NonFiniteCount& more) {
    if (more.elements > 0 && (elements == 0 || more.block < block)) {
      tensor = more.tensor;
      block = more.block;
    }
    elements += more.elements;
  }
  void add(const kernels::Tally& tally, std::span<const kernels::Chunk> chunks) {
    if (tally.non_finite > 0) add({tally.non_finite, chunks[static_cast<size_t>(tally.first_chunk)].tensor, 0});
  }
};

class HostTable {
 public:
  /// Takes the parts that calls go through, by the first chunk of each in `begins`. Threads divide a part where waking
  /// them pays. `pool` outlives it.
  HostTable(std::vector<kernels::Chunk> chunks, RunCutter runs, size_t num_averages, base::ThreadPool& pool,
            std::span<const size_t> begins);

  /// Updates the averages of a part. Allocates nothing.
  NonFiniteCount update(size_t part, const kernels::Step& step, bool by_runs);
  /// Copies the parameters into every average, converted, rounded to nearest even.
  void copy_parameters(size_t part);

  int64_t bytes() const noexcept;

 private:
  template <typename Fn>
  void for_each_block(size_t part, const Fn& fn);

  std::vector<kernels::Chunk> chunks_;
  RunCutter runs_;
  size_t num_averages_;
  base::ThreadPool& pool_;
  std::vector<WorkShares> parts_;
  std::vector<NonFiniteCount> counts_;  // of the threads; kept, so that an update allocates nothing
};

}  // namespace shardow::average
