#include "file/direct.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

namespace shardow::file {

Direct::Direct(const std::vector<Mine>& mine, const Layout& layout, Output& output, bool count_only)
    : mine_(mine), layout_(layout), output_(output), count_only_(count_only), order_(mine.size()) {
  std::iota(order_.begin(), order_.end(), size_t{0});
  const auto where = [&](size_t i) {
    const Place& place = layout.place(mine[i].tensor);
    return std::pair(place.file, place.entry.begin);
  };
  std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return where(a) < where(b); });
}

comm::Part Direct::part() {
  const comm::PartTime time;
  const int64_t before = done_;
  while (next_ < mine_.size() && !time.over()) {
    const Mine& mine = mine_[order_[next_]];
    if (!runs_) {
      runs_.emplace(mine.region);
      run_ = runs_->next();
    }
    if (run_) {
      chunk(mine);
    } else {
      runs_.reset();
      ++next_;
    }
  }
  return {done_ - before, next_ == mine_.size()};
}

void Direct::chunk(const Mine& mine) {
  const Entry& entry = layout_.place(mine.tensor).entry;
  const int64_t count = std::min(run_->length, chunk_elements(entry.dtype));
  const std::span<const std::byte> data = feed_.get(mine, run_->local_begin, run_->local_begin + count, entry.dtype);
  const int64_t begin = bytes_of(run_->global_begin, entry);
  output_.count(mine.tensor, begin, data);
  if (!count_only_) output_.write(mine.tensor, begin, data);
  done_ += static_cast<int64_t>(data.size());
  *run_ = {run_->global_begin + count, run_->local_begin + count, run_->length - count};
  if (run_->length == 0) run_ = runs_->next();
}

}  // namespace shardow::file
