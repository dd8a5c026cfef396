// Plan: the chunk table of one binding, built once and used by every update until an address changes.
//
// Invariants: chunks are in the order of the views and of their elements; each lies inside one view; every element of every view is in
// exactly one chunk; cuts inside a view fall on multiples of 16 elements, so that a view aligned to 64 bytes stays aligned in every chunk.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

/// Elements of the largest chunk: 256 KiB of float32, large enough to hide a chunk's start, small enough to divide work evenly.
inline constexpr int64_t kChunkElements = int64_t{64} * 1024;

/// Where a chunk may be cut: by memory alone, or also where the global index jumps (noise is drawn by global index).
enum class Cut { kMemory, kRuns };

/// One table for `parameters` and their averages; averages[k][i] belongs to parameters[i] and has its region.
std::vector<kernels::Chunk> make_chunks(std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages, Cut cut);

/// True where the two ways to cut differ for these views, so that a table of runs is worth having.
bool has_jumps(std::span<const TensorView> parameters);

/// Boundaries of `parts` contiguous shares of nearly equal elements: share i is chunks [result[i], result[i + 1]).
/// The same chunks always give the same shares: an owner keeps its part of the averages in its cache.
std::vector<size_t> partition(std::span<const kernels::Chunk> chunks, int parts);

}  // namespace shardow::average
