// The runs of each region ascend, so a merge of all cursors by their next run's begin sees every element of the tensor
// in order, holding one run per region.
#include "tensor/coverage.h"

#include <algorithm>
#include <optional>
#include <queue>

#include "base/checked.h"
#include "tensor/runs.h"

namespace shardow {
namespace {

class Merge {
 public:
  explicit Merge(const std::vector<Region>& regions) {
    cursors_.reserve(regions.size());
    for (const Region& region : regions) {
      cursors_.emplace_back(region);
      refill(cursors_.size() - 1);
    }
  }

  /// The run with the least global_begin that was not returned yet.
  std::optional<Run> next() {
    if (heap_.empty()) return std::nullopt;
    const Head head = heap_.top();
    heap_.pop();
    refill(head.cursor);
    return head.run;
  }

 private:
  struct Head {
    Run run;
    size_t cursor;
    bool operator<(const Head& other) const {
      return run.global_begin > other.run.global_begin;
    }  // the queue's top is its greatest
  };

  void refill(size_t cursor) {
    if (const std::optional<Run> run = cursors_[cursor].next()) heap_.push({*run, cursor});
  }

  std::vector<RunCursor> cursors_;
  std::priority_queue<Head> heap_;
};

bool check(const std::vector<Region>& regions, bool once, int64_t* where) {
  if (regions.empty()) base::fail(Code::kInvalidArgument, "no regions: nothing says which shape to cover");
  const Shape& shape = regions.front().shape();
  for (const Region& region : regions) {
    if (region.shape() != shape)
      base::fail(Code::kInvalidArgument, "regions {} and {} are of different tensors", regions.front().to_string(),
                 region.to_string());
  }
  const auto found = [&](int64_t element) {
    if (where != nullptr) *where = element;
    return false;
  };
  int64_t reached = 0;  // every element before it is held
  Merge merge(regions);
  while (const std::optional<Run> run = merge.next()) {
    if (run->global_begin > reached) return found(reached);
    if (once && run->global_begin < reached) return found(run->global_begin);
    reached = std::max(reached, run->global_begin + run->length);
  }
  return reached == base::checked_product(shape) || found(reached);
}

}  // namespace

bool covers(const std::vector<Region>& regions, int64_t* where) {
  return check(regions, false, where);
}
bool covers_once(const std::vector<Region>& regions, int64_t* where) {
  return check(regions, true, where);
}

}  // namespace shardow
