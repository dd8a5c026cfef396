// The grid behind a Region, with what its walkers need computed once.
#pragma once

#include <cstdint>
#include <vector>

#include "shardow/region.h"

namespace shardow {

/// Invariants: dims[d] is sorted, inside [0, shape[d]), and its intervals neither touch nor are empty; every size of
/// `shape` fits, and so does its product.
struct Region::Grid {
  Grid(Shape shape, std::vector<std::vector<Interval>> dims);

  Shape shape;
  std::vector<std::vector<Interval>> dims;
  Shape counts;          // indices that dims[d] holds
  int64_t elements = 1;  // product of counts

  // Where elements > 0. The split is the last dimension that is not whole: a row is what the grid holds for one index
  // of each dimension before it, a run within a row is an interval of the split times `inner`, the product of the whole
  // dimensions after it.
  int split = -1;  // -1: every dimension is whole
  int64_t inner = 1;
  Shape strides;  // of the global tensor, in elements
};

/// How many indices a dimension's intervals hold.
int64_t num_indices(const std::vector<Interval>& intervals);

/// The intervals of those in [begin, end) of their numbering.
std::vector<Interval> slice(const std::vector<Interval>& intervals, int64_t begin, int64_t end);

}  // namespace shardow
