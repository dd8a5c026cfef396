#include "average/replicas.h"

#include <algorithm>
#include <cstring>

#include "average/division.h"
#include "base/errors.h"
#include "group/ranks.h"
#include "group/wire.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

std::span<std::byte> memory_of(const shardow::Stretch& stretch, std::span<const TensorView> views) {
  const TensorView& view = views[stretch.tensor];
  return {data_at(view, stretch.begin), static_cast<size_t>(byte_size(view.dtype, stretch.end - stretch.begin))};
}

size_t bytes_of(const std::vector<shardow::Stretch>& stretches, std::span<const TensorView> views) {
  size_t bytes = 0;
  for (const auto& stretch : stretches) bytes += memory_of(stretch, views).size();
  return bytes;
}

}  // namespace

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

ReplicaExchange::ReplicaExchange(const Group& replicas, std::span<const TensorView> views) {
  const ReplicaLevel level[] = {{replicas.rank(), replicas.size()}};
  std::vector<Divided> tensors;
  for (const TensorView& view : views) tensors.push_back({view.region, byte_size(view.dtype, 1)});
  steps_ = plan_exchange(tensors, level);
  size_t most = 0;
  for (const ExchangeStep& step : steps_) {
    for (const auto& owned : step.members) most = std::max(most, bytes_of(owned, views));
  }
  packed_.resize(most);
}

void ReplicaExchange::run(Group& replicas, std::span<const TensorView> views, Deadline deadline) {
  for (const ExchangeStep& step : steps_) {
    for (int owner = 0; owner < replicas.size(); ++owner) {
      const auto& owned = step.members[static_cast<size_t>(owner)];
      const std::span<std::byte> packed = std::span(packed_).first(bytes_of(owned, views));
      if (packed.empty()) continue;
      const bool sends = owner == replicas.rank();
      if (!sends) group::ranks_of(replicas).broadcast(packed, owner, deadline);
      std::byte* at = packed.data();
      for (const auto& stretch : owned) {
        const std::span<std::byte> memory = memory_of(stretch, views);
        if (!memory.empty()) std::memcpy(sends ? at : memory.data(), sends ? memory.data() : at, memory.size());
        at += memory.size();
      }
      if (sends) group::ranks_of(replicas).broadcast(packed, owner, deadline);
    }
  }
}

}  // namespace shardow::average
