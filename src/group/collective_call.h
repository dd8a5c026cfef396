// One verb of all ranks, step by step: what it compares, and work that is done part by part.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/turns.h"
#include "group/agree.h"
#include "shardow/group.h"

namespace shardow::group {

class CollectiveCall;

/// One rank's part of a comparison. What words() throws on one rank, and sum_up(), all throw.
class Comparison {
 public:
  virtual ~Comparison() = default;

  virtual std::string words() = 0;  ///< this rank's, for a round

  /// On one rank, of all ranks' words: what they come to. A rank that compares less has no words.
  virtual std::string sum_up(const std::vector<std::string>& by_rank) const = 0;

  /// Takes, on every rank, what they came to. May be collective, and throw the same on all.
  virtual void take(CollectiveCall& call, const std::string& total) = 0;
};

/// Lists the comparisons of a rank in one round, which they outlive.
using Comparisons = std::vector<Comparison*>;

/// Makes several comparisons in one round, in their order.
class Joint final : public Comparison {
 public:
  Joint() = default;
  explicit Joint(Comparisons parts) : parts_(std::move(parts)) {}

  std::string words() override;  ///< empty where all parts' are
  std::string sum_up(const std::vector<std::string>& by_rank) const override;
  void take(CollectiveCall& call, const std::string& total) override;

 private:
  Comparisons parts_;
};

/// Takes to all ranks what rank 0 brings.
class FromFirst final : public Comparison {
 public:
  explicit FromFirst(std::string own = {}) : text(std::move(own)) {}

  std::string words() override { return text; }
  std::string sum_up(const std::vector<std::string>& by_rank) const override { return by_rank.front(); }
  void take(CollectiveCall& /*call*/, const std::string& total) override { text = total; }

  std::string text;  ///< rank 0's, once it is taken
};

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

/// Each step is one round and ends alike on all ranks, by agree()'s rule; a rank waits for the others' as long as the
/// timeout from the end of its own.
class CollectiveCall {
 public:
  using ProgressFn = std::function<void(int64_t done, int64_t total)>;
  using Prepare = std::function<Comparisons()>;

  CollectiveCall(Group& group, std::chrono::milliseconds timeout, ProgressFn progress = {})
      : group_(group), timeout_(timeout), progress_(std::move(progress)) {}

  Group& group() const noexcept { return group_; }
  int rank() const noexcept { return group_.rank(); }
  int size() const noexcept { return group_.size(); }
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }
  Deadline deadline() const { return base::after(timeout_); }  ///< of a step that begins now
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  void set_progress(ProgressFn progress) { progress_ = std::move(progress); }

  /// Returns what `sum_up` makes, on one rank, of what `step` returned on each; empty where all returned nothing.
  std::string step(const std::function<std::string()>& step, const SumUp& sum_up) const;

  /// Compares what `prepare` returns, which looks at what this rank was given.
  void compare(const Prepare& prepare);

  /// Calls `part`, which takes about a second at most, until it is done on every rank; the timeout counts from one part
  /// to the next. Rank 0 calls the callback of progress in the step after the part, so that a callback that throws
  /// stops all ranks at once. `last`: what ranks compare when all are done; asked for once, when this rank is.
  void work(int64_t total_bytes, const std::function<Part()>& part, const Prepare& last = {});

  /// Tells the progress that work() has not told yet; to be called in a step after it.
  void tell_progress();

 private:
  Group& group_;
  std::chrono::milliseconds timeout_;
  ProgressFn progress_;
  int64_t total_ = 0, done_ = 0, told_ = -1;
};

}  // namespace shardow::group
