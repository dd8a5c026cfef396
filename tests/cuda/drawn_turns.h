// The host's threads by turns, drawn from a seed: at each call of the fake runtime, and where one waits for another,
// whoever has the turn may pass it on. Exactly one thread goes on at any time, so what happens is a function of the
// seed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "base/turns.h"

namespace shardow::fake {

/// While it lives, threads take turns. The thread that makes it has the first one; workers are made and end meanwhile.
class DrawnTurns final : public base::Turns {
 public:
  explicit DrawnTurns(uint64_t seed);
  ~DrawnTurns() override;
  DrawnTurns(const DrawnTurns&) = delete;
  DrawnTurns& operator=(const DrawnTurns&) = delete;

  void add(const void* who) override;
  void begin(const void* who) override;
  void end() override;
  void await(const std::function<bool()>& done) override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  void pass();
  void give(Lock& lock, bool others_only);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  unsigned stays_;                                    // a turn is passed on once in so many times
  std::vector<std::pair<const void*, int>> present_;  // (who, number), in the order in which they were added
  int turn_ = 0, next_ = 1;
};

}  // namespace shardow::fake
