// A chunk table on the host, gone through by threads: of weights that live there, or of a ring through which they come.
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

/// Parameter elements that were NaN or Inf.
struct alignas(64) NonFiniteCount {
  int64_t elements = 0;
  uint64_t tensor = 0;  ///< hash_name() of the first that has one, if any
  size_t block = 0;     ///< where it was met: the first of all is the same whichever thread took which block

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
  /// `begins`: the first chunk of each part that is gone through in one call, divided among the threads where they are
  /// worth it. `pool` outlives it.
  HostTable(std::vector<kernels::Chunk> chunks, RunCutter runs, size_t num_averages, base::ThreadPool& pool,
            std::span<const size_t> begins);

  /// Allocates nothing.
  NonFiniteCount update(size_t part, const kernels::Step& step, bool by_runs);
  /// Every average <- its parameter, converted, rounded to nearest even.
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
