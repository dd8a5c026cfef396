// Replicas: ranks that hold the same views and divide the work of averaging them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "average/division.h"
#include "shardow/group.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

/// What replicas are about to swap, as it travels: which averages, of how many updates, of which views.
std::string swap_facts(size_t k, int64_t updates, std::span<const TensorView> views);

/// Of `everybody`, their swap_facts(), before they overwrite each other's memory: throws kInvalidArgument where they
/// are in different swaps or have made other updates. Not empty where their views are not the same.
std::string other_views(const std::vector<std::string>& by_rank);

/// Throws kInvalidArgument that names the first view that is another one. Collective.
[[noreturn]] void refuse_views(Group& replicas, std::span<const TensorView> views, Deadline deadline);

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
