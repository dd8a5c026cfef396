// Placement: what a mesh of ranks does to a tensor, in torch.distributed.tensor's words, and the region that one of its ranks holds.
//
//   // a (4096, 1024) weight on 2 x 4 ranks: replicated over the first mesh dimension, its rows cut by the second; this is rank (1, 3)
//   const MeshDim mesh[] = {{2, 1}, {4, 3}};
//   const Placement placements[] = {Placement::replicate(), Placement::shard(0)};
//   const Region mine = region_of("weight", {4096, 1024}, mesh, placements);  // rows 3072 to 4095
//
// A mesh is a grid of ranks. Each of its dimensions replicates a tensor or cuts one of the tensor's dimensions as torch.chunk() does:
// into parts of ceil(n / ranks), the last ones shorter or empty. Mesh dimensions apply from left to right; a strided shard waits for later
// ones that cut the same tensor dimension, as where tensor parallelism cuts first what fully_shard then cuts.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "shardow/region.h"

#pragma GCC visibility push(default)
namespace shardow {

/// What one dimension of a mesh does to a tensor.
struct Placement {
  enum class Kind : uint8_t { kReplicate, kShard, kPartial } kind = Kind::kReplicate;
  int dim = 0;               ///< kShard: the tensor's dimension that is cut; -1 is the last one
  int64_t split_factor = 1;  ///< kShard: into how many parts later mesh dimensions cut `dim` before this one does; 1: it waits for none

  static Placement replicate() noexcept { return {}; }
  static Placement shard(int dim, int64_t split_factor = 1) noexcept { return {Kind::kShard, dim, split_factor}; }
  static Placement partial() noexcept { return {Kind::kPartial}; }  ///< terms of a sum: no region says what such a rank holds
};

/// A dimension of a mesh as one rank sees it.
struct MeshDim {
  int64_t size;        ///< ranks along it
  int64_t coordinate;  ///< this rank's place among them
};

/// What the rank at `mesh` holds of a tensor: placements[i] is what mesh[i] does to it. `name` is for messages. Throws kUnsupported for a
/// partial placement, and for a split factor that later mesh dimensions don't make up; kInvalidArgument for another number of placements, a
/// coordinate outside its dimension, and a dimension that the tensor lacks.
Region region_of(std::string_view name, const Shape& shape, std::span<const MeshDim> mesh, std::span<const Placement> placements);

}  // namespace shardow
#pragma GCC visibility pop
