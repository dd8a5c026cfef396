#include "file/direct.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tensor/dtype.h"

namespace shardow::file {
namespace {

constexpr int64_t kTogetherBytes = int64_t{1} << 20;  // that a thread takes at once, of short runs

/// Of what is in memory as much as a write takes; of what is produced less, since every thread holds it.
int64_t chunk_of(const Mine& mine, DType dtype) {
  return mine.producer != nullptr ? kTogetherBytes * 8 / dtype_bits(dtype) / 16 * 16 : chunk_elements(dtype);
}

}  // namespace

Direct::Direct(const std::vector<Mine>& mine, const Layout& layout, std::deque<Output>& outputs, bool count_only)
    : mine_(mine),
      layout_(layout),
      outputs_(outputs),
      count_only_(count_only),
      feeds_(outputs.size()),
      order_(mine.size()) {
  std::iota(order_.begin(), order_.end(), size_t{0});
  const auto where = [&](size_t i) {
    const Place place = layout.place(mine[i].tensor);
    return std::pair(place.file, place.entry.begin);
  };
  std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return where(a) < where(b); });
}

group::Part Direct::part() {
  const int64_t before = done_;
  const group::PartTime time;
  lanes_.run(outputs_.size(), [&](size_t lane) {
    std::vector<Chunk> chunks;
    while (!time.over() && !lanes_.failed() && next(chunks)) {
      for (const Chunk& chunk : chunks) perform(chunk, feeds_[lane], outputs_[lane]);
    }
  });
  const base::Lock lock(mutex_);
  return {done_ - before, next_ == order_.size()};
}

/// What a thread does next: a chunk, or short runs one after another; false after the last.
bool Direct::next(std::vector<Chunk>& chunks) {
  const base::Lock lock(mutex_);
  chunks.clear();
  for (int64_t bytes = 0; bytes < kTogetherBytes && find_run();) {
    const Mine& mine = mine_[order_[next_]];
    const Entry& entry = layout_.place(mine.tensor).entry;
    const int64_t count = std::min(run_->length, chunk_of(mine, entry.dtype));
    chunks.push_back({&mine, {run_->global_begin, run_->local_begin, count}});
    bytes += bytes_of(count, entry);
    *run_ = {run_->global_begin + count, run_->local_begin + count, run_->length - count};
    if (run_->length == 0) run_ = runs_->next();
  }
  return !chunks.empty();
}

/// Goes to the next part where the one at hand has no more runs; false after the last.
bool Direct::find_run() {
  while (next_ < order_.size() && !run_) {
    if (!runs_) {
      run_ = runs_.emplace(mine_[order_[next_]].region).next();
    } else {
      runs_.reset();
      ++next_;
    }
  }
  return run_.has_value();
}

void Direct::perform(const Chunk& chunk, Feed& feed, Output& output) {
  const auto& [mine, run] = chunk;
  const Entry& entry = layout_.place(mine->tensor).entry;
  const std::span<const std::byte> data = feed.get(*mine, run.local_begin, run.local_begin + run.length, entry.dtype);
  const int64_t begin = bytes_of(run.global_begin, entry);
  output.count(mine->tensor, begin, data);
  if (!count_only_) output.write(mine->tensor, begin, data);
  done_ += static_cast<int64_t>(data.size());
}

}  // namespace shardow::file
