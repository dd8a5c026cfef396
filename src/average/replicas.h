// Replicas: ranks that hold the same views and divide the work of averaging them.
#pragma once

#include <span>
#include <vector>

#include "shardow/group.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

/// What member `index` of `count` averages of each view: its region and memory.
std::vector<TensorView> parts_of(std::span<const TensorView> views, int index, int count);

/// Collective. Each member's part of every view is copied into the other members'; host memory only.
void all_gather_parts(Group& replicas, std::span<const TensorView> views, Deadline deadline);

}  // namespace shardow::average
