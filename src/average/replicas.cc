#include "average/replicas.h"

#include <algorithm>
#include <cstring>

#include "average/division.h"
#include "base/errors.h"
#include "comm/wire.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

std::string described(std::span<const TensorView> views) {
  comm::Sender out;
  for (const TensorView& view : views) {
    out.text(view.name);
    out.text(fmt::format("{} of {}", dtype_name(view.dtype), view.region.to_string()));
  }
  return out.bytes();
}

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

std::string swap_facts(size_t k, int64_t updates, std::span<const TensorView> views) {
  comm::Sender out;
  out.number(static_cast<int64_t>(k));
  out.number(updates);
  std::string all = described(views);
  for (const TensorView& view : views) all += view.region.encode();
  out.number(static_cast<int64_t>(comm::digest(all)));
  return out.bytes();
}

std::string other_views(const std::vector<std::string>& by_rank) {
  comm::Receiver zero(by_rank[0]);
  const int64_t k = zero.number(), updates = zero.number(), digest = zero.number();
  bool same = true;
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    comm::Receiver other(by_rank[rank]);
    if (const int64_t theirs = other.number(); theirs != k)
      base::fail(Code::kInvalidArgument, "replica 0 calls swap_in({}) where replica {} calls swap_in({})", k, rank,
                 theirs);
    if (const int64_t theirs = other.number(); theirs != updates) {
      base::fail(Code::kInvalidArgument,
                 "swap_in(): replica 0 has made {} updates of its part of the averages, replica {} {}; call update() "
                 "on every replica after each step",
                 updates, rank, theirs);
    }
    same = same && other.number() == digest;
  }
  return same ? "" : "other views";
}

void refuse_views(Group& replicas, std::span<const TensorView> views, Deadline deadline) {
  const std::vector<std::string> by_rank = replicas.all_gather(described(views), deadline);
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    comm::Receiver first(by_rank[0]), other(by_rank[rank]);
    while (!first.done() || !other.done()) {
      const std::string nothing = "nothing";
      const std::string name = first.done() ? nothing : first.text(), is = first.done() ? "" : first.text();
      const std::string other_name = other.done() ? nothing : other.text(), other_is = other.done() ? "" : other.text();
      if (name == other_name && is == other_is) continue;
      base::fail(Code::kInvalidArgument,
                 "swap_in(): '{}', {}, on replica 0 is '{}', {}, on replica {}; give all of AverageOptions.replicas "
                 "the same views in the same order",
                 name, is, other_name, other_is, rank);
    }
  }
  base::fail(Code::kInvalidArgument, "swap_in(): replicas hold regions of the same description that are not the same");
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
      if (!sends) replicas.broadcast(packed, owner, deadline);
      std::byte* at = packed.data();
      for (const auto& stretch : owned) {
        const std::span<std::byte> memory = memory_of(stretch, views);
        if (!memory.empty()) std::memcpy(sends ? at : memory.data(), sends ? memory.data() : at, memory.size());
        at += memory.size();
      }
      if (sends) replicas.broadcast(packed, owner, deadline);
    }
  }
}

}  // namespace shardow::average
