// What two regions of one tensor have in common: what a load copies from a file's piece into a rank's memory.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>

#include "base/errors.h"
#include "shardow/region.h"
#include "tensor/runs.h"

namespace shardow {

/// Calls fn(global_begin, a_local, b_local, length) for every stretch that both hold and that is contiguous in both, in
/// ascending order. The runs of a region ascend in global and in local order, so one pass over both lists finds all:
/// O(runs of a + runs of b), no allocation. Throws kInvalidArgument for different shapes.
template <std::invocable<int64_t, int64_t, int64_t, int64_t> Fn>
void for_each_overlap(const Region& a, const Region& b, Fn&& fn) {
  if (a.shape() != b.shape())
    base::fail(Code::kInvalidArgument, "regions {} and {} are of different tensors", a.to_string(), b.to_string());
  RunCursor a_runs(a), b_runs(b);
  auto left = a_runs.next(), right = b_runs.next();
  while (left && right) {
    const int64_t left_end = left->global_begin + left->length, right_end = right->global_begin + right->length;
    const int64_t begin = std::max(left->global_begin, right->global_begin), end = std::min(left_end, right_end);
    if (begin < end) {
      fn(begin, left->local_begin + (begin - left->global_begin), right->local_begin + (begin - right->global_begin),
         end - begin);
    }
    if (left_end <= right_end) {
      left = a_runs.next();
    } else {
      right = b_runs.next();
    }
  }
}

}  // namespace shardow
