// A region is made once and asked often: construction checks and normalises, so that everything after it is plain
// arithmetic that cannot overflow (every product is bounded by the elements of the global tensor).
#include "shardow/region.h"

#include <algorithm>
#include <limits>

#include "base/checked.h"
#include "tensor/grid.h"
#include "tensor/runs.h"

namespace shardow {
namespace {

using base::fail;

/// Drops empty intervals and joins adjacent ones. Throws where they are not sorted, disjoint and inside [0, size).
std::vector<Interval> normalised(const std::vector<Interval>& intervals, size_t dim, int64_t size) {
  std::vector<Interval> result;
  int64_t reached = 0;
  for (const auto& [begin, end] : intervals) {
    if (begin > end || begin < 0 || end > size) {
      fail(Code::kInvalidArgument, "interval [{}, {}) of dimension {} is not inside its {} indices", begin, end, dim,
           size);
    }
    if (begin < reached)
      fail(Code::kInvalidArgument, "interval [{}, {}) of dimension {} begins before {}, where the last one ends", begin,
           end, dim, reached);
    reached = end;
    if (begin == end) continue;
    if (!result.empty() && result.back().end == begin) {
      result.back().end = end;
    } else {
      result.push_back({begin, end});
    }
  }
  return result;
}

}  // namespace

int64_t num_indices(const std::vector<Interval>& intervals) {
  int64_t count = 0;
  for (const auto& [begin, end] : intervals) count += end - begin;
  return count;
}

std::vector<Interval> slice(const std::vector<Interval>& intervals, int64_t begin, int64_t end) {
  std::vector<Interval> result;
  int64_t seen = 0;
  for (const auto& [first, last] : intervals) {
    const int64_t from = std::max(begin - seen, int64_t{0}), to = std::min(end - seen, last - first);
    if (from < to) result.push_back({first + from, first + to});
    seen += last - first;
  }
  return result;
}

Region::Grid::Grid(Shape shape_, std::vector<std::vector<Interval>> dims_)
    : shape(std::move(shape_)), dims(std::move(dims_)) {
  if (shape.size() > static_cast<size_t>(kMaxDims))
    fail(Code::kInvalidArgument, "a tensor of {} dimensions; at most {} are supported", shape.size(), kMaxDims);
  base::checked_product(shape);
  if (dims.size() != shape.size())
    fail(Code::kInvalidArgument, "intervals for {} dimensions of a tensor that has {}", dims.size(), shape.size());
  for (size_t d = 0; d < dims.size(); ++d) {
    dims[d] = normalised(dims[d], d, shape[d]);
    counts.push_back(num_indices(dims[d]));
  }
  elements = base::checked_product(counts);
  if (elements == 0) return;
  strides.assign(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  for (size_t d = 0; d < shape.size(); ++d) {
    if (counts[d] != shape[d]) split = static_cast<int>(d);
  }
  inner = split < 0 ? elements : strides[static_cast<size_t>(split)];
}

Region Region::whole(Shape shape) {
  std::vector<std::vector<Interval>> dims;
  for (const int64_t size : shape) dims.push_back({{0, size}});
  return grid(std::move(shape), std::move(dims));
}

Region Region::grid(Shape shape, std::vector<std::vector<Interval>> dims) {
  auto made = std::make_shared<const Grid>(std::move(shape), std::move(dims));
  const int64_t elements = made->elements;
  return Region(std::move(made), 0, elements);
}

Region Region::window(int64_t begin, int64_t end) const {
  if (begin < 0 || begin > end || end > size())
    fail(Code::kInvalidArgument, "window [{}, {}) of a region of {} elements", begin, end, size());
  return Region(grid_, begin_ + begin, begin_ + end);
}

Region Region::part(int index, int count, int64_t align) const {
  if (count < 1 || index < 0 || index >= count) fail(Code::kInvalidArgument, "part {} of {}", index, count);
  if (align < 1) fail(Code::kInvalidArgument, "parts cut at multiples of {} elements; at least 1 is needed", align);
  const int64_t blocks = size() / align + (size() % align != 0);
  const auto begin_of = [&](int64_t part) {
    const int64_t block = blocks / count * part + std::min(part, blocks % count);
    return block == blocks ? size() : block * align;
  };
  return window(begin_of(index), begin_of(index + int64_t{1}));
}

const Shape& Region::shape() const noexcept {
  return grid_->shape;
}

const Shape& Region::grid_shape() const noexcept {
  return grid_->counts;
}

bool Region::operator==(const Region& other) const noexcept {
  if (size() != other.size()) return false;
  if (grid_ == other.grid_ && begin_ == other.begin_) return true;  // without a look at the grid, which may be far away
  if (shape() != other.shape()) return false;
  if (begin_ == other.begin_ && grid_->dims == other.grid_->dims) return true;
  RunCursor mine(*this), theirs(other);
  for (;;) {
    const std::optional<Run> run = mine.next();
    if (run != theirs.next()) return false;
    if (!run) return true;
  }
}

/// Dimension by dimension: elements whose index there is smaller come before, those with the same index are decided by
/// the next one.
int64_t Region::position(int64_t global) const noexcept {
  const Grid& grid = *grid_;
  int64_t before = 0, below = grid.elements;
  for (size_t d = 0; d < grid.dims.size() && below > 0; ++d) {
    below /= grid.counts[d];
    const int64_t index = global / grid.strides[d];
    global -= index * grid.strides[d];
    bool same = false;
    for (const auto& [begin, end] : grid.dims[d]) {
      before += (std::clamp(index, begin, end) - begin) * below;
      same = same || (begin <= index && index < end);
    }
    if (!same) return std::clamp(before, begin_, end_) - begin_;
  }
  if (grid.dims.empty()) before = std::min<int64_t>(global, grid.elements);  // a scalar
  return std::clamp(before, begin_, end_) - begin_;
}

int64_t Region::num_runs() const noexcept {
  int64_t count = 0;
  for_each_run([&](const Run&) { ++count; });
  return count;
}

bool Region::contiguous() const noexcept {
  RunCursor cursor(*this);
  return !cursor.next() || !cursor.next();
}

}  // namespace shardow
