// The host's threads by turns, drawn from a seed: at each call of the fake runtime, and where one waits for another,
// whoever has the turn may pass it on. Exactly one thread goes on at any time, so what happens is a function of the
// seed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

#include "base/turns.h"
#include "fake.h"

namespace shardow::fake {

/// While it lives, threads take turns. The thread that makes it has the first one; workers are made and end meanwhile.
class DrawnTurns final : public base::Turns {
 public:
  explicit DrawnTurns(uint64_t seed) : random_(seed), stays_(1 + static_cast<unsigned>(random_() % 8)) {
    identity = nullptr;
    base::turns = this;
    between = [this] { pass(); };
  }
  ~DrawnTurns() override {
    base::turns = nullptr;
    between = nullptr;
  }

  void add(const void* who) override {
    const Lock lock(mutex_);
    present_.push_back(who);
  }
  void begin(const void* who) override {
    Lock lock(mutex_);
    identity = who;
    changed_.wait(lock, [&] { return turn_ == who; });
  }
  void end() override {
    const Lock lock(mutex_);
    std::erase(present_, identity);
    turn_ = present_[random_() % present_.size()];
    changed_.notify_all();
  }
  void await(const std::function<bool()>& done) override {
    while (!done()) {
      Lock lock(mutex_);
      if (present_.size() == 1) give_up("a thread waits for another one, and there is none");
      give(lock, true);
    }
  }

 private:
  static inline thread_local const void* identity = nullptr;  // who this thread is

  using Lock = std::unique_lock<std::mutex>;

  void pass() {
    Lock lock(mutex_);
    if (present_.size() > 1 && random_() % stays_ == 0) give(lock, false);
  }
  /// Returns when this thread has the turn again.
  void give(Lock& lock, bool others_only) {
    do {
      turn_ = present_[random_() % present_.size()];
    } while (others_only && turn_ == identity);
    if (turn_ == identity) return;
    changed_.notify_all();
    changed_.wait(lock, [&] { return turn_ == identity; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  unsigned stays_;                             // a turn is passed on once in so many times
  std::vector<const void*> present_{nullptr};  // in the order in which they were added; null: who made this
  const void* turn_ = nullptr;
};

}  // namespace shardow::fake
