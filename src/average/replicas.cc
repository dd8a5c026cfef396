// A part is a window of the region, so it is one contiguous stretch of the view's memory: dividing and gathering never copies more than
// the bytes that move.
#include "average/replicas.h"

#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow::average {

TensorView part_of(const TensorView& view, int index, int count) {
  int64_t begin = 0;
  for (int i = 0; i < index; ++i) begin += view.region.part(i, count).size();
  TensorView part = view;
  part.region = view.region.part(index, count);
  part.data = static_cast<std::byte*>(view.data) + byte_size(view.dtype, begin);
  return part;
}

std::vector<TensorView> parts_of(std::span<const TensorView> views, int index, int count) {
  std::vector<TensorView> parts;
  parts.reserve(views.size());
  for (const TensorView& view : views) parts.push_back(part_of(view, index, count));
  return parts;
}

void all_gather_parts(Group& replicas, std::span<const TensorView> views, Deadline deadline) {
  for (const TensorView& view : views) {
    for (int owner = 0; owner < replicas.size(); ++owner) {
      const TensorView part = part_of(view, owner, replicas.size());
      const auto bytes = static_cast<size_t>(byte_size(part.dtype, part.region.size()));
      if (bytes > 0) replicas.broadcast({static_cast<std::byte*>(part.data), bytes}, owner, deadline);
    }
  }
}

}  // namespace shardow::average
