#include "average/replicas.h"

#include "shardow/division.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

std::byte* at(const TensorView& view, int64_t element) {
  return static_cast<std::byte*>(view.data) + byte_size(view.dtype, element);
}

}  // namespace

std::vector<TensorView> parts_of(std::span<const TensorView> views, int index, int count) {
  const ReplicaLevel level[] = {{index, count}};
  std::vector<TensorView> parts(views.begin(), views.end());
  for (TensorView& view : parts) {
    const auto [region, begin] = owned(view.region, level);
    view.data = at(view, begin);
    view.region = region;
  }
  return parts;
}

void all_gather_parts(Group& replicas, std::span<const TensorView> views, Deadline deadline) {
  const ReplicaLevel level[] = {{replicas.rank(), replicas.size()}};
  std::vector<Divided> tensors;
  for (const TensorView& view : views) tensors.push_back({view.region, byte_size(view.dtype, 1)});
  for (const ExchangeStep& step : plan_exchange(tensors, level)) {
    for (int owner = 0; owner < replicas.size(); ++owner) {
      for (const auto& [tensor, begin, end] : step.members[static_cast<size_t>(owner)]) {
        const auto bytes = static_cast<size_t>(byte_size(views[tensor].dtype, end - begin));
        if (bytes > 0) replicas.broadcast({at(views[tensor], begin), bytes}, owner, deadline);
      }
    }
  }
}

}  // namespace shardow::average
