// Steps that every rank takes: an error on one is the same error on all, and slow work shows that it goes on.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "shardow/checkpoint.h"
#include "shardow/group.h"

namespace shardow::file {

/// Runs `fn` here; then, if it threw on any rank, throws on every rank: its own exception where it threw, else the first failing rank's
/// code, errno and message. kTimeout or kPeerFailed where a rank does not come within `timeout`.
void together(Group& group, std::chrono::milliseconds timeout, const std::function<void()>& fn);

/// The same, and tells every rank what fn() gave on each, by rank.
std::vector<std::string> gather_together(Group& group, std::chrono::milliseconds timeout, const std::function<std::string()>& fn);

/// Bytes that a part of the work did; whether all of it is done; and what the last part has for all ranks.
struct Part {
  int64_t bytes;
  bool last;
  std::string words = {};
};

/// How long a rank works before it tells the others: from its making until over().
class PartTime {
 public:
  bool over() const { return std::chrono::steady_clock::now() - begin_ > std::chrono::milliseconds(500); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// Work of all ranks that goes on: the timeout counts from one part to the next, not for all of it.
class Parts {
 public:
  Parts(Group& group, std::chrono::milliseconds timeout, int64_t total_bytes, ProgressFn progress)
      : group_(group), timeout_(timeout), total_(total_bytes), progress_(std::move(progress)) {}

  /// Calls `part`, which takes about a second at most, until it is done on every rank; returns the words of their last parts. Progress is
  /// told in the step after the one that it is about, so that a callback that throws stops all ranks at once.
  std::vector<std::string> run(const std::function<Part()>& part);

  /// What run() has not told yet; to be called in a step after it.
  void tell();

 private:
  Group& group_;
  std::chrono::milliseconds timeout_;
  int64_t total_, done_ = 0, told_ = -1;
  ProgressFn progress_;
};

}  // namespace shardow::file
