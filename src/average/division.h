// Division: which of the ranks that hold the same elements owns which of them, and how they send each other what they
// own.
//
// Groups of such ranks nest (a replica of a replica): each level divides what the level before it left to this rank. An
// exchange goes the other way, from the last level to the first: what a group has together after its step is what each
// of its members owns one level up. Everything here is arithmetic on regions. Ranks that are given the same tensors
// make the same plan, and nothing is sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "shardow/region.h"

namespace shardow {

/// This rank's place in a group of ranks that hold the same elements.
struct ReplicaLevel {
  int index, count;
};

/// Part of a region that replicas hold; it begins at element `begin` of the region's local memory.
struct Owned {
  Region region;
  int64_t begin;
};

/// The part of `region` that this rank owns: all of it where there are no levels. Parts are cut as Region::part() cuts
/// them; the ranks' parts cover the region exactly once. Throws kInvalidArgument for an index outside its count.
Owned owned(const Region& region, std::span<const ReplicaLevel> levels);

/// A tensor that replicas hold whole and own in parts.
struct Divided {
  Region region;     ///< that all of them hold, the same on all
  int64_t itemsize;  ///< bytes of an element
  int64_t kind = 0;  ///< tensors of different kinds (dtype, device) are not sent together
};

/// Elements [begin, end) of the local memory of tensor number `tensor`.
struct Stretch {
  size_t tensor;
  int64_t begin, end;
  bool operator==(const Stretch&) const = default;
};

/// One collective among the members of level number `level`: members[m] is what member m owns, to be sent to the
/// others. All lists name the same tensors in the same order; stretches may be empty, but not all of them.
struct ExchangeStep {
  size_t level;
  std::vector<std::vector<Stretch>> members;
  bool operator==(const ExchangeStep&) const = default;
};

inline constexpr int64_t kExchangeBytes = int64_t{32} << 20;

/// The steps after which every replica has every owner's part of `tensors`, in order. A step has tensors of one kind
/// whose local memory has `bytes` together, or a stretch of one tensor, of which all members send `bytes` together (at
/// least an element each). All members of a group have the same steps of its level. Throws kInvalidArgument for a place
/// outside its level and sizes below 1.
std::vector<ExchangeStep> plan_exchange(std::span<const Divided> tensors, std::span<const ReplicaLevel> levels,
                                        int64_t bytes = kExchangeBytes);

}  // namespace shardow
