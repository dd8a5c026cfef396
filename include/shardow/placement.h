// The region that a rank of a mesh holds, from torch.distributed.tensor's placements.
#pragma once

#include <span>

#include "shardow/region.h"

#pragma GCC visibility push(default)
namespace shardow {

struct Placement {
  enum class Kind : uint8_t { kReplicate, kShard, kPartial } kind = Kind::kReplicate;
  int dim = 0;               ///< kShard: of the tensor; -1: the last
  int64_t split_factor = 1;  ///< torch's _StridedShard

  static Placement replicate() noexcept { return {}; }
  static Placement shard(int dim, int64_t split_factor = 1) noexcept { return {Kind::kShard, dim, split_factor}; }
  static Placement partial() noexcept { return {Kind::kPartial}; }  ///< refused: kUnsupported
};

struct MeshDim {
  int64_t size;
  int64_t coordinate;
};

/// placements[i] is what mesh[i] does, left to right, as torch.chunk() cuts.
Region region_of(std::string_view name, const Shape& shape, std::span<const MeshDim> mesh,
                 std::span<const Placement> placements);

}  // namespace shardow
#pragma GCC visibility pop
