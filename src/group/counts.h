// Numbers that all ranks count, and rank 0 needs.
#pragma once

#include <cstdint>
#include <span>

#include "shardow/group.h"

namespace shardow::group {

enum class Op { kSum, kXor };

/// Numbers of a rank, as many as of the others, and how those of all ranks are joined: by sums or XOR.
struct Counts {
  std::span<uint64_t> numbers;
  Op op;
};

/// Joins the counts of all ranks on rank 0, where ranks send each other no blocks: a round of each. Collective.
void join_by_rounds(Group& group, std::span<const Counts> counts, Deadline deadline);

/// Joins them on rank 0 where ranks send each other blocks, along a tree: rank r hears from 2 r + 1 and 2 r + 2. Costs
/// no round, and is called within a step that all ranks agree on, since a rank that gets no block throws.
void join_by_blocks(Group& group, std::span<const Counts> counts, Deadline deadline);

}  // namespace shardow::group
