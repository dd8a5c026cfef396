// The grid behind a Region, with what its walkers need computed once.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "shardow/region.h"
#include "tensor/runs.h"

namespace shardow {

/// Numbers that are compared often: those of most grids lie in place, in the line or two that a look at the grid brings
/// anyhow.
class GridKey {
 public:
  GridKey() = default;
  GridKey(size_t num_dims, std::span<const int64_t> numbers)
      : num_dims_(num_dims),
        rest_(numbers.begin() + static_cast<std::ptrdiff_t>(std::min(numbers.size(), kInPlace)), numbers.end()) {
    std::copy_n(numbers.begin(), std::min(numbers.size(), kInPlace), in_place_.begin());
  }

  bool operator==(const GridKey& other) const noexcept {
    uint64_t differing = num_dims_ ^ other.num_dims_;
    for (size_t i = 0; i < kInPlace; ++i)
      differing |= static_cast<uint64_t>(in_place_[i] ^ other.in_place_[i]);  // no branches
    return differing == 0 && rest_ == other.rest_;
  }

 private:
  static constexpr size_t kInPlace = 8;  // a matrix's, in one interval for each dimension

  size_t num_dims_ = 0;
  std::array<int64_t, kInPlace> in_place_{};
  std::vector<int64_t> rest_;
};

/// Invariants: dims[d] is sorted, inside [0, shape[d]), and its intervals neither touch nor are empty; every size of
/// `shape` fits, and so does its product.
struct Region::Grid {
  Grid(Shape shape, std::vector<std::vector<Interval>> dims);

  Shape shape;
  GridKey key;  // shape and dims: equal where those are
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

inline const GridKey& RunCursor::key_of(const Region& region) noexcept {
  return region.grid_->key;
}

}  // namespace shardow
