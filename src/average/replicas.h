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

/// How replicas send each other their parts of `views`. Local.
std::vector<ExchangeStep> exchange_of(const Group& replicas, std::span<const TensorView> views);

/// Collective. Each member's part of every view is copied into the other members', in these steps; host memory only.
/// Allocates nothing of its own, so that what fails is a round, which fails for all.
void all_gather_parts(Group& replicas, std::span<const TensorView> views, std::span<const ExchangeStep> steps,
                      Deadline deadline);

}  // namespace shardow::average
