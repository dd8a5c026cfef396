// An odometer over the grid. Its lowest wheel is the interval list of the split dimension: one interval times the whole
// dimensions after it is one contiguous piece. The wheels above count the indices of the dimensions before the split,
// one row each. Two pieces join into one run only where a row ends at the end of the split dimension and the next
// begins at its start, so a run has at most two pieces.
#include "tensor/runs.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tensor/grid.h"

namespace shardow {
namespace {

/// The interval that holds the `position`-th index of the list, and that index. O(intervals).
std::pair<size_t, int64_t> locate(const std::vector<Interval>& intervals, int64_t position) noexcept {
  size_t i = 0;
  for (; position >= intervals[i].end - intervals[i].begin; ++i) position -= intervals[i].end - intervals[i].begin;
  return {i, intervals[i].begin + position};
}

}  // namespace

RunCursor::RunCursor(const Region& region) noexcept : grid_(region.grid_.get()), left_(region.size()) {
  const Region::Grid& grid = *grid_;
  if (left_ == 0) {
    ahead_ = {};
    return;
  }
  if (grid.split < 0) {
    ahead_ = {region.begin_, 0, left_};
    left_ = 0;
    return;
  }
  const auto split = static_cast<size_t>(grid.split);
  const int64_t row_length = grid.counts[split] * grid.inner;
  int64_t row = region.begin_ / row_length;
  const int64_t within = region.begin_ % row_length;
  for (size_t d = split; d-- > 0; row /= grid.counts[d]) {
    const auto [interval, index] = locate(grid.dims[d], row % grid.counts[d]);
    row_[d] = {interval, index};
    row_begin_ += index * grid.strides[d];
  }
  const auto [interval, index] = locate(grid.dims[split], within / grid.inner);
  column_ = interval;
  skip_ = (index - grid.dims[split][interval].begin) * grid.inner + within % grid.inner;
  ahead_ = next_piece();
}

std::optional<Run> RunCursor::next() noexcept {
  if (ahead_.length == 0) return std::nullopt;
  Run run = ahead_;
  ahead_ = next_piece();
  while (ahead_.length > 0 && ahead_.global_begin == run.global_begin + run.length) {
    run.length += ahead_.length;
    ahead_ = next_piece();
  }
  return run;
}

/// Length 0 when nothing is left.
Run RunCursor::next_piece() noexcept {
  if (left_ == 0) return {};
  const std::vector<Interval>& intervals = grid_->dims[static_cast<size_t>(grid_->split)];
  const auto [begin, end] = intervals[column_];
  const Run piece{row_begin_ + begin * grid_->inner + skip_, local_,
                  std::min((end - begin) * grid_->inner - skip_, left_)};
  skip_ = 0;
  local_ += piece.length;
  left_ -= piece.length;
  if (++column_ == intervals.size()) {
    column_ = 0;
    if (left_ > 0) next_row();
  }
  return piece;
}

void RunCursor::next_row() noexcept {
  for (auto d = static_cast<size_t>(grid_->split); d-- > 0;) {
    const std::vector<Interval>& intervals = grid_->dims[d];
    const int64_t was = row_[d].index;
    auto& [interval, index] = row_[d];
    bool carry = false;
    if (++index == intervals[interval].end) {
      carry = ++interval == intervals.size();
      if (carry) interval = 0;
      index = intervals[interval].begin;
    }
    row_begin_ += (index - was) * grid_->strides[d];
    if (!carry) return;
  }
}

void Region::for_each_run(const std::function<void(const Run&)>& fn) const {
  RunCursor cursor(*this);
  while (const std::optional<Run> run = cursor.next()) fn(*run);
}

}  // namespace shardow
