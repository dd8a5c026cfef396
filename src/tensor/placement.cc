// The rule was compared with what torch's fully_shard, parallelize_module and distribute_tensor really cut
// (python/tests/model/ test_regions.py), since torch's own helper for offsets is wrong for tensor parallelism under
// fully_shard where sizes are uneven.
#include "shardow/placement.h"

#include <algorithm>

#include "base/errors.h"
#include "tensor/grid.h"

namespace shardow {
namespace {

using base::fail;
using Intervals = std::vector<Interval>;

/// Part `index` of torch.chunk(count) of the indices in `held`.
Intervals chunk(const Intervals& held, int64_t count, int64_t index) {
  const int64_t total = num_indices(held), each = total / count + (total % count != 0);
  if (each == 0 || index > total / each) return {};
  return slice(held, each * index, each * index + std::min(each, total - each * index));
}

/// The cut of dimension `dim` by number `place` of the mesh, and the factor that later mesh dimensions have still to
/// make up before it.
struct Cut {
  size_t place;
  MeshDim mesh;
  size_t dim;
  int64_t waits_for;
};

class Cutter {
 public:
  Cutter(std::string_view name, const Shape& shape) : name_(name) {
    for (const int64_t size : shape) dims_.push_back({{0, size}});
  }

  void add(size_t place, const MeshDim& mesh, const Placement& placement) {
    const auto num_dims = static_cast<int>(dims_.size());
    const int dim = placement.dim < 0 ? placement.dim + num_dims : placement.dim;
    if (dim < 0 || dim >= num_dims)
      fail(Code::kInvalidArgument, "'{}' is sharded along dimension {}; it has {}", name_, placement.dim, num_dims);
    if (placement.split_factor < 1)
      fail(Code::kInvalidArgument, "'{}' has a split factor of {}", name_, placement.split_factor);
    const Cut cut{place, mesh, static_cast<size_t>(dim), placement.split_factor};
    if (cut.waits_for > 1) {
      late_.push_back(cut);
    } else {
      apply(cut);
    }
  }

  std::vector<Intervals> take() {
    if (!late_.empty()) refuse(late_.front());
    return std::move(dims_);
  }

 private:
  void apply(const Cut& cut) {
    dims_[cut.dim] = chunk(dims_[cut.dim], cut.mesh.size, cut.mesh.coordinate);
    for (Cut& one : late_) {
      if (one.dim != cut.dim || one.place > cut.place) continue;
      if (one.waits_for % cut.mesh.size != 0) refuse(one);
      one.waits_for /= cut.mesh.size;
    }
    const auto ready = std::find_if(late_.begin(), late_.end(), [](const Cut& one) { return one.waits_for == 1; });
    if (ready == late_.end()) return;
    const Cut next = *ready;
    late_.erase(ready);
    apply(next);
  }

  [[noreturn]] void refuse(const Cut& cut) const {
    fail(Code::kUnsupported,
         "'{}' has a strided shard of dimension {} whose split factor later mesh dimensions don't make up ({} is "
         "left); only views of "
         "sharded tensors have that",
         name_, cut.dim, cut.waits_for);
  }

  std::string_view name_;
  std::vector<Intervals> dims_;  // what is left of each dimension
  std::vector<Cut> late_;        // in the mesh's order
};

}  // namespace

Region region_of(std::string_view name, const Shape& shape, std::span<const MeshDim> mesh,
                 std::span<const Placement> placements) {
  if (mesh.size() != placements.size())
    fail(Code::kInvalidArgument, "'{}' has {} placements on a mesh of {} dimensions", name, placements.size(),
         mesh.size());
  Cutter cutter(name, shape);
  for (size_t i = 0; i < mesh.size(); ++i) {
    const auto& [size, coordinate] = mesh[i];
    if (coordinate < 0 || coordinate >= size)
      fail(Code::kInvalidArgument, "'{}' is placed at coordinate {} of a mesh dimension of {} ranks", name, coordinate,
           size);
    if (placements[i].kind == Placement::Kind::kPartial)
      fail(Code::kUnsupported, "'{}' has a partial placement, which no weight has; average it when it is reduced",
           name);
    if (placements[i].kind == Placement::Kind::kShard) cutter.add(i, mesh[i], placements[i]);
  }
  return Region::grid(shape, cutter.take());
}

}  // namespace shardow
