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

/// Joins the counts of all ranks on rank 0, along a tree: rank r hears from 2 r + 1 and 2 r + 2. To be called within a
/// step that all ranks agree on, since a rank that does not hear from another throws.
void join_on_first(Group& group, std::span<const Counts> counts, Deadline deadline);

}  // namespace shardow::group
