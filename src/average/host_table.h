// A chunk table on the host, gone through by threads: of weights that live there, or of a ring through which they come.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "average/plan.h"
#include "average/shares.h"
#include "base/threads.h"
#include "kernels/kernels.h"

namespace shardow::average {

/// Parameter elements that were NaN or Inf.
struct alignas(64) NonFiniteCount {
  int64_t elements = 0;
  const void* first = nullptr;  ///< start of the first chunk that has one; null if none
  size_t block = 0;             ///< of that chunk: the first of all is the same whichever thread took which block

  void add(const NonFiniteCount& more) {
    elements += more.elements;
    if (more.first == nullptr || (first != nullptr && block <= more.block)) return;
    first = more.first;
    block = more.block;
  }
  void add(const kernels::Tally& tally, std::span<const kernels::Chunk> chunks) {
    add({tally.non_finite, tally.first_chunk >= 0 ? chunks[static_cast<size_t>(tally.first_chunk)].parameter : nullptr,
         0});
  }
};

class HostTable {
 public:
  /// `pool` outlives it.
  HostTable(std::vector<kernels::Chunk> chunks, RunCutter runs, size_t num_averages, base::ThreadPool& pool);

  std::span<const kernels::Chunk> chunks() const noexcept { return chunks_; }
  /// Chunks [begin, end), divided among the threads where they are worth it.
  Shares shares(size_t begin, size_t end) const;

  /// What `shares` divides; they are taken meanwhile. Allocates nothing.
  NonFiniteCount update(Shares& shares, const kernels::Step& step, bool by_runs);
  /// Every average <- its parameter, converted, rounded to nearest even.
  void copy_parameters(Shares& shares);

  int64_t bytes() const noexcept;

 private:
  template <typename Fn>
  void for_each_block(Shares& shares, const Fn& fn);

  std::vector<kernels::Chunk> chunks_;
  RunCutter runs_;
  size_t num_averages_;
  base::ThreadPool& pool_;
  std::vector<NonFiniteCount> counts_;  // of the threads; kept, so that an update allocates nothing
};

}  // namespace shardow::average
