// RunCursor: the runs of a region one at a time, where Region::for_each_run() would have to stop and go on.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "shardow/region.h"

namespace shardow {

/// Walks the maximal runs of a region, which must outlive it. Allocates nothing; the first run is found by arithmetic,
/// not by walking up to it.
class RunCursor {
 public:
  explicit RunCursor(const Region& region) noexcept;
  explicit RunCursor(Region&&) = delete;

  /// The next run; nothing after the last.
  std::optional<Run> next() noexcept;

 private:
  struct Place {
    size_t interval;
    int64_t index;
  };

  Run next_piece() noexcept;
  void next_row() noexcept;

  const Region::Grid* grid_;
  std::array<Place, kMaxDims> row_;  // coordinates of the current row in the dimensions before the grid's split
  size_t column_ = 0;                // interval of the split dimension
  int64_t row_begin_ = 0;            // global index of the current row
  int64_t skip_ = 0;                 // elements of the current interval before the window
  int64_t local_ = 0, left_;         // elements before and after
  Run ahead_;                        // not yet returned; it may grow; length 0 at the end
};

}  // namespace shardow
