// The host's threads by turns, drawn from a seed: at each call of the fake runtime, and where one waits for another,
// whoever has the turn may pass it on. Exactly one thread goes on at any time, so what happens is a function of the
// seed.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "base/turns.h"
#include "fake.h"

namespace shardow::fake {

/// While it lives, threads take turns. The thread that makes it has the first one; workers are made and end meanwhile.
class DrawnTurns final : public base::Turns {
 public:
  explicit DrawnTurns(uint64_t seed)
      : random_(seed), stays_(1 + static_cast<unsigned>(random_() % 8)), present_{{nullptr, 0}} {
    mine = 0;
    base::turns = this;
    between = [this] { pass(); };
  }
  ~DrawnTurns() override {
    base::turns = nullptr;
    between = nullptr;
  }
  DrawnTurns(const DrawnTurns&) = delete;
  DrawnTurns& operator=(const DrawnTurns&) = delete;

  void add(const void* who) override {
    const Lock lock(mutex_);
    present_.emplace_back(who, next_++);
    changed_.notify_all();
  }
  void begin(const void* who) override {
    Lock lock(mutex_);
    changed_.wait(lock, [&] {
      const auto found =
          std::find_if(present_.begin(), present_.end(), [&](const auto& one) { return one.first == who; });
      return found != present_.end() && (mine = found->second) == turn_;
    });
  }
  void end() override {
    const Lock lock(mutex_);
    std::erase_if(present_, [](const auto& one) { return one.second == mine; });
    turn_ = present_[random_() % present_.size()].second;
    changed_.notify_all();
  }
  void await(const std::function<bool()>& done) override {
    while (!done()) {
      Lock lock(mutex_);
      if (present_.size() == 1) {
        std::fprintf(stderr, "a thread waits for another one, and there is none\n");
        std::abort();
      }
      give(lock, true);
    }
  }

 private:
  static inline thread_local int mine = 0;

  using Lock = std::unique_lock<std::mutex>;

  void pass() {
    Lock lock(mutex_);
    if (present_.size() > 1 && random_() % stays_ == 0) give(lock, false);
  }
  /// Returns when this thread has the turn again.
  void give(Lock& lock, bool others_only) {
    const int me = mine;
    do {
      turn_ = present_[random_() % present_.size()].second;
    } while (others_only && turn_ == me);
    if (turn_ == me) return;
    changed_.notify_all();
    changed_.wait(lock, [&] { return turn_ == me; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  unsigned stays_;                                    // a turn is passed on once in so many times
  std::vector<std::pair<const void*, int>> present_;  // (who, number), in the order in which they were added
  int turn_ = 0, next_ = 1;
};

}  // namespace shardow::fake
