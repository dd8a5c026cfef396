// Work that all ranks do part by part: slow work shows that it goes on, and stops on all ranks where it fails on one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/turns.h"
#include "group/agree.h"
#include "shardow/group.h"

namespace shardow::group {

/// Bytes that a part of the work did, and whether all of it is done.
struct Part {
  int64_t bytes;
  bool last;
};

/// How long a rank works before it tells the others: from its making until over().
class PartTime {
 public:
  bool over() const { return base::now() - begin_ > std::chrono::milliseconds(500); }

 private:
  std::chrono::steady_clock::time_point begin_ = base::now();
};

/// The timeout counts from one part to the next, not for all of the work.
class Parts {
 public:
  using ProgressFn = std::function<void(int64_t done, int64_t total)>;

  Parts(Group& group, std::chrono::milliseconds timeout, int64_t total_bytes, ProgressFn progress)
      : group_(group), timeout_(timeout), total_(total_bytes), progress_(std::move(progress)) {}

  /// Calls `part`, which takes about a second at most, until it is done on every rank, and agree()s on each. Progress
  /// is told on rank 0 in the step after the one that it is about, so that a callback that throws stops all ranks at
  /// once. `last`: what ranks compare when all are done; its words are asked for once, when this rank is.
  void run(const std::function<Part()>& part, const Comparison& last = {});

  /// What run() has not told yet; to be called in a step after it.
  void tell();

 private:
  Group& group_;
  std::chrono::milliseconds timeout_;
  int64_t total_, done_ = 0, told_ = -1;
  ProgressFn progress_;
};

}  // namespace shardow::group
