// The chunk table of one binding, built once and used by every update until an address changes.
//
// Invariants: chunks are in the order of the views and of their elements; each lies inside one view; every element of
// every view is in exactly one chunk; cuts inside a view fall on multiples of 16 elements, so that a view aligned to 64
// bytes stays aligned in every chunk.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/kernels.h"
#include "shardow/region.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

/// Elements of the largest chunk: 256 KiB of float32, large enough to hide a chunk's start, small enough to divide work
/// evenly.
inline constexpr int64_t kChunkElements = int64_t{64} * 1024;

/// Returns the FNV-1a hash (Fowler, Noll, Vo), which spreads names, so that equal positions of two tensors draw
/// different noise.
uint64_t hash_name(std::string_view name);

/// Makes one table for `parameters` and their averages, cut only for size; averages[k][i] belongs to parameters[i] and
/// has its region. Chunk c of a view begins at its element c * chunk_elements; global_begin counts as if the view were
/// the first elements of its tensor. `chunk_elements`: a power of two, at least 16.
std::vector<kernels::Chunk> make_chunks(std::span<const TensorView> parameters,
                                        std::span<const std::vector<TensorView>> averages,
                                        int64_t chunk_elements = kChunkElements);

/// Cuts a table's chunks where the global index jumps, a few at a time as they are needed: a table of runs would take
/// 104 bytes for each.
class RunCutter {
 public:
  /// Cuts the table that make_chunks() made for `parameters`. Where no index jumps it keeps nothing, and chunks stay as
  /// they are.
  explicit RunCutter(std::span<const TensorView> parameters, int64_t chunk_elements = kChunkElements);

  bool cuts() const noexcept { return !regions_.empty(); }
  size_t bytes() const noexcept;

  using Pieces = std::span<const kernels::Chunk>;
  /// Calls fn(pieces) for a few pieces at a time, in order, of chunks [begin, end) of `table`. Allocates nothing.
  void for_each(std::span<const kernels::Chunk> table, size_t begin, size_t end,
                const std::function<void(Pieces)>& fn) const;

 private:
  class Batch;

  std::vector<Region> regions_;  // of the views, in order
  std::vector<size_t> firsts_;   // parallel to regions_: the view's first chunk
  int64_t chunk_elements_;
};

/// Returns all these pieces as one table, for devices that cannot walk regions.
std::vector<kernels::Chunk> make_runs(const RunCutter& cutter, std::span<const kernels::Chunk> table);

/// Returns the boundaries of `parts` contiguous shares of nearly equal elements: share i is chunks [result[i], result[i
/// + 1]). The same chunks always give the same shares: an owner keeps its part of the averages in its cache.
std::vector<size_t> partition(std::span<const kernels::Chunk> chunks, int parts);

/// Returns the bytes from one average's first byte to the next one's, on a CPU. Each average has `bytes`, a multiple of
/// 64.
///
/// Streams whose addresses agree modulo 64 MiB, to within about 8 MiB, were measured to run at a third of the speed of
/// others (docs/architecture.md), so large averages are spread evenly over that period. The gaps are never
/// touched: they cost address space, not memory.
int64_t arena_stride(int64_t bytes, int num_averages);

}  // namespace shardow::average
