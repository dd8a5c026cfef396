// Replicas: ranks that hold the same views and divide the work of averaging them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "average/division.h"
#include "group/facts.h"
#include "shardow/group.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

/// How many updates a rank has made of its part of the averages.
group::Fact updates_fact(int64_t updates);

/// What replicas must have equal before they overwrite each other's memory.
group::Facts swap_facts(size_t k, int64_t updates, std::span<const TensorView> views);

/// What member `index` of `count` averages of each view: its region and memory.
std::vector<TensorView> parts_of(std::span<const TensorView> views, int index, int count);

/// How replicas copy their parts of views into each other's memory, the host's. Takes all the memory for it when it is
/// made, so that what fails in run() is a round, which fails for all.
class ReplicaExchange {
 public:
  ReplicaExchange(const Group& replicas, std::span<const TensorView> views);
  /// Collective: a broadcast for each owner and step, of all its stretches together. `views` are those that it was made
  /// for, wherever they lie by now.
  void run(Group& replicas, std::span<const TensorView> views, Deadline deadline);

 private:
  std::vector<ExchangeStep> steps_;
  std::vector<std::byte> packed_;
};

}  // namespace shardow::average
