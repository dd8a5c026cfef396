#include "average/replicas.h"

#include "average/division.h"
#include "base/errors.h"
#include "group/ranks.h"
#include "group/wire.h"
#include "tensor/dtype.h"

namespace shardow::average {

group::Fact updates_fact(int64_t updates) {
  return {"the number of updates of the averages", std::to_string(updates),
          "call update() on every rank after each step (not under `if rank == 0`), or load the last state on all of "
          "them"};
}

group::Facts swap_facts(size_t k, int64_t updates, std::span<const TensorView> views) {
  group::Facts facts = {{"the average that is swapped in", std::to_string(k)}, updates_fact(updates)};
  std::string regions;
  for (const TensorView& view : views) {
    regions += view.region.encode();
    facts.push_back({fmt::format("view {}", facts.size() - 2),
                     fmt::format("'{}', {} of {}", view.name, dtype_name(view.dtype), view.region.to_string()),
                     "give all of AverageOptions.replicas the same views in the same order"});
  }
  facts.push_back({"a digest of all regions", std::to_string(group::digest(regions))});
  return facts;
}

std::vector<TensorView> parts_of(std::span<const TensorView> views, int index, int count) {
  const ReplicaLevel level[] = {{index, count}};
  std::vector<TensorView> parts(views.begin(), views.end());
  for (TensorView& view : parts) {
    const auto [region, begin] = owned(view.region, level);
    view.data = data_at(view, begin);
    view.region = region;
  }
  return parts;
}

std::vector<ExchangeStep> exchange_of(const Group& replicas, std::span<const TensorView> views) {
  const ReplicaLevel level[] = {{replicas.rank(), replicas.size()}};
  std::vector<Divided> tensors;
  for (const TensorView& view : views) tensors.push_back({view.region, byte_size(view.dtype, 1)});
  return plan_exchange(tensors, level);
}

void all_gather_parts(Group& replicas, std::span<const TensorView> views, std::span<const ExchangeStep> steps,
                      Deadline deadline) {
  for (const ExchangeStep& step : steps) {
    for (int owner = 0; owner < replicas.size(); ++owner) {
      for (const auto& [tensor, begin, end] : step.members[static_cast<size_t>(owner)]) {
        const auto bytes = static_cast<size_t>(byte_size(views[tensor].dtype, end - begin));
        if (bytes > 0) group::ranks_of(replicas).broadcast({data_at(views[tensor], begin), bytes}, owner, deadline);
      }
    }
  }
}

}  // namespace shardow::average
