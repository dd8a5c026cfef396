// The region that a rank of a mesh holds, from torch.distributed.tensor's placements.
//
//   const MeshDim mesh[] = {{2, 1}, {4, 3}};  // 2 x 4 ranks; this is rank (1, 3)
//   const Placement placements[] = {Placement::replicate(), Placement::shard(0)};
//   const Region mine = region_of("weight", {4096, 1024}, mesh, placements);  // rows 3072 to 4095
//
// Shards are cut as torch.chunk() cuts, by mesh dimensions from left to right.
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
  int dim = 0;               ///< kShard: the tensor's dimension; -1 is the last
  int64_t split_factor = 1;  ///< torch's _StridedShard; 1: an ordinary shard

  static Placement replicate() noexcept { return {}; }
  static Placement shard(int dim, int64_t split_factor = 1) noexcept { return {Kind::kShard, dim, split_factor}; }
  static Placement partial() noexcept { return {Kind::kPartial}; }  ///< terms of a sum: kUnsupported
};

/// A dimension of a mesh as one rank sees it.
struct MeshDim {
  int64_t size;        ///< ranks along it
  int64_t coordinate;  ///< this rank's place among them
};

/// placements[i] is what mesh[i] does; `name` is for messages.
Region region_of(std::string_view name, const Shape& shape, std::span<const MeshDim> mesh, std::span<const Placement> placements);

}  // namespace shardow
#pragma GCC visibility pop
