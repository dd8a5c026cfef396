// Two steps. In the grid's own numbering, where dimension d has counts[d] indices, the window is a flat range; peeling
// it from the front, always taking the largest box that begins there, gives at most 2n - 1 boxes. Each is then laid on
// the global tensor: a dimension whose indices lie in several intervals breaks it, and so that every box stays one
// stretch of local memory, the dimensions before the last such one go index by index.
#include <algorithm>

#include "shardow/region.h"
#include "tensor/grid.h"

namespace shardow {
namespace {

/// A box in the grid's numbering, or on the global tensor.
struct Corner {
  Shape offsets, sizes;
};

int64_t product(const Shape& sizes) {
  int64_t result = 1;
  for (const int64_t size : sizes) result *= size;
  return result;
}

/// The largest box of a tensor of shape `counts` that begins at flat index `begin` and ends at or before `end`,
/// contiguous there. At least one dimension.
Corner first_box(const Shape& counts, int64_t begin, int64_t end) {
  const size_t n = counts.size();
  Shape strides(n, 1);
  for (size_t d = n; d-- > 1;) strides[d - 1] = strides[d] * counts[d];
  size_t d = 0;  // the box spans dimensions after d, part of d, and one index of each before
  while (d + 1 < n && (begin % strides[d] != 0 || strides[d] > end - begin)) ++d;
  int64_t reach = end - begin;
  if (d > 0) reach = std::min(reach, strides[d - 1] - begin % strides[d - 1]);
  Corner box{Shape(n), counts};
  for (size_t i = 0; i < n; ++i) box.offsets[i] = begin / strides[i] % counts[i];
  std::fill_n(box.sizes.begin(), d, 1);
  box.sizes[d] = reach / strides[d];
  return box;
}

std::vector<Interval> one_by_one(const std::vector<Interval>& intervals) {
  std::vector<Interval> result;
  for (const auto& [begin, end] : intervals) {
    for (int64_t index = begin; index < end; ++index) result.push_back({index, index + 1});
  }
  return result;
}

/// The cross product of `dims` in row-major order, one box for each combination of intervals.
void append_boxes(const std::vector<std::vector<Interval>>& dims, int64_t& local, std::vector<Box>& out) {
  std::vector<size_t> at(dims.size());
  for (;;) {
    Box box{Shape(dims.size()), Shape(dims.size()), local};
    for (size_t d = 0; d < dims.size(); ++d) {
      box.offsets[d] = dims[d][at[d]].begin;
      box.sizes[d] = dims[d][at[d]].end - dims[d][at[d]].begin;
    }
    local += product(box.sizes);
    out.push_back(std::move(box));
    size_t d = dims.size();
    while (d > 0 && ++at[d - 1] == dims[d - 1].size()) at[--d] = 0;
    if (d == 0) return;
  }
}

}  // namespace

std::vector<Box> Region::boxes() const {
  std::vector<Box> result;
  int64_t local = 0;
  for (int64_t begin = begin_; begin < end_;) {
    if (shape().empty()) return {{{}, {}, 0}};
    const Corner box = first_box(grid_->counts, begin, end_);
    std::vector<std::vector<Interval>> dims;
    size_t last_broken = 0;
    for (size_t d = 0; d < box.sizes.size(); ++d) {
      dims.push_back(slice(grid_->dims[d], box.offsets[d], box.offsets[d] + box.sizes[d]));
      if (dims[d].size() > 1) last_broken = d;
    }
    for (size_t d = 0; d < last_broken; ++d) dims[d] = one_by_one(dims[d]);
    append_boxes(dims, local, result);
    begin += product(box.sizes);
  }
  return result;
}

}  // namespace shardow
