// Replicas: ranks that hold the same elements and divide the work of averaging them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "group/facts.h"
#include "shardow/group.h"
#include "shardow/region.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

/// Returns the number of updates that a rank has made of its part of the averages, for a comparison of ranks.
group::Fact updates_fact(int64_t updates);

/// Returns what must be equal on all replicas before they overwrite each other's memory.
group::Facts swap_facts(size_t k, int64_t updates, std::span<const TensorView> views);

/// This rank's place in a group of ranks that hold the same elements.
struct ReplicaLevel {
  int index, count;
};

/// Part of a region that replicas hold; it begins at element `begin` of the region's local memory.
struct Owned {
  Region region;
  int64_t begin;
};

/// Returns the part of `region` that this rank owns: all of it without levels. Groups nest: each level divides what
/// the level before it left to this rank. Parts are cut as Region::part() cuts them; the ranks' parts cover the region
/// exactly once. Throws kInvalidArgument for an index outside its count.
Owned owned(const Region& region, std::span<const ReplicaLevel> levels);

/// Returns the part of each view that member `index` of `count` averages, with its region and memory.
std::vector<TensorView> parts_of(std::span<const TensorView> views, int index, int count);

/// Copies replicas' parts of views into each other's host memory. Its constructor allocates all memory, so that only a
/// round can fail in run(), which fails for all.
class ReplicaExchange {
 public:
  ReplicaExchange(const Group& replicas, std::span<const TensorView> views);
  /// Collective: each owner broadcasts its parts of all views in messages of at most 32 MiB.
  void run(Group& replicas, Deadline deadline);

 private:
  struct Message {
    int owner;
    size_t bytes = 0;
    std::vector<std::span<std::byte>> pieces = {};
  };

  std::vector<Message> messages_;
  std::vector<std::byte> packed_;
};

}  // namespace shardow::average
