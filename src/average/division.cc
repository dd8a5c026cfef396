// A part is a window of the region, so it is one stretch of its local memory: dividing and exchanging never copies more
// than what moves. Small tensors share a step, since a collective's latency is that of a hundred of them; large ones
// are sent in several, since what arrives needs memory of its own until all of it is there.
#include "average/division.h"

#include <algorithm>

#include "base/checked.h"

namespace shardow {
namespace {

using base::fail;

int64_t longest(const std::vector<Stretch>& stretches) {
  int64_t most = 0;
  for (const Stretch& one : stretches) most = std::max(most, one.end - one.begin);
  return most;
}

class Planner {
 public:
  Planner(std::span<const Divided> tensors, std::span<const ReplicaLevel> levels, int64_t bytes)
      : tensors_(tensors), levels_(levels), bytes_(bytes) {}

  std::vector<ExchangeStep> plan() {
    for (size_t level = levels_.size(); level-- > 0;) {
      if (levels_[level].count == 1) continue;
      for (size_t first = 0; first < tensors_.size();) {
        const size_t end = end_of_bucket(first);
        if (end > first + 1) {
          add_bucket(level, first, end);
        } else {
          add_one(level, first);
        }
        first = end;
      }
    }
    return std::move(steps_);
  }

 private:
  int64_t bytes_of(const Divided& one) const { return base::checked_mul(one.region.size(), one.itemsize); }

  size_t end_of_bucket(size_t first) const {
    size_t end = first + 1;
    int64_t left = bytes_ - bytes_of(tensors_[first]);
    for (; end < tensors_.size() && tensors_[end].kind == tensors_[first].kind && bytes_of(tensors_[end]) <= left;
         ++end) {
      left -= bytes_of(tensors_[end]);
    }
    return end;
  }

  /// What each member of the level owns of the tensor.
  std::vector<Stretch> owners(size_t tensor, size_t level) const {
    auto [left, begin] = owned(tensors_[tensor].region, levels_.first(level));
    std::vector<Stretch> found;
    for (int member = 0; member < levels_[level].count; ++member) {
      const int64_t size = left.part(member, levels_[level].count).size();
      found.push_back({tensor, begin, begin + size});
      begin += size;
    }
    return found;
  }

  void add_bucket(size_t level, size_t first, size_t end) {
    ExchangeStep step{level, std::vector<std::vector<Stretch>>(static_cast<size_t>(levels_[level].count))};
    bool empty = true;
    for (size_t tensor = first; tensor < end; ++tensor) {
      const std::vector<Stretch> parts = owners(tensor, level);
      for (size_t member = 0; member < parts.size(); ++member) step.members[member].push_back(parts[member]);
      empty = empty && longest(parts) == 0;
    }
    if (!empty) steps_.push_back(std::move(step));
  }

  /// In several steps where it is large.
  void add_one(size_t level, size_t tensor) {
    const std::vector<Stretch> parts = owners(tensor, level);
    const int64_t all = longest(parts),
                  most = std::max<int64_t>(bytes_ / tensors_[tensor].itemsize / levels_[level].count, 1);
    for (int64_t at = 0; at < all; at += std::min(most, all - at)) {
      ExchangeStep& step = steps_.emplace_back(ExchangeStep{level, {}});
      for (const auto& [_, begin, end] : parts) {
        const int64_t from = std::min(begin + at, end);
        step.members.push_back({{tensor, from, from + std::min(most, end - from)}});
      }
    }
  }

  std::span<const Divided> tensors_;
  std::span<const ReplicaLevel> levels_;
  int64_t bytes_;
  std::vector<ExchangeStep> steps_;
};

}  // namespace

Owned owned(const Region& region, std::span<const ReplicaLevel> levels) {
  Owned left{region, 0};
  for (const auto& [index, count] : levels) {
    const Region part = left.region.part(index, count);  // before the others are counted: it checks the index
    for (int before = 0; before < index; ++before) left.begin += left.region.part(before, count).size();
    left.region = part;
  }
  return left;
}

std::vector<ExchangeStep> plan_exchange(std::span<const Divided> tensors, std::span<const ReplicaLevel> levels,
                                        int64_t bytes) {
  for (const auto& [index, count] : levels) {
    if (index < 0 || index >= count) fail(Code::kInvalidArgument, "replica {} of {}", index, count);
  }
  for (const Divided& one : tensors) {
    if (one.itemsize < 1) fail(Code::kInvalidArgument, "elements of {} bytes", one.itemsize);
  }
  if (bytes < 1) fail(Code::kInvalidArgument, "steps of {} bytes", bytes);
  return Planner(tensors, levels, bytes).plan();
}

}  // namespace shardow
