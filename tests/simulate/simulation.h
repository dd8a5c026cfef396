// Ranks as threads, of which exactly one goes on at a time, with a clock of their own: who goes on, how long everything takes and what the
// system would draw at random are functions of one seed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/turns.h"

namespace shardow::simulated {

using std::chrono::milliseconds;

class Simulation final : public base::Turns {
 public:
  /// `with_story`: remember() keeps what it is told.
  explicit Simulation(uint64_t seed, bool with_story = false);
  ~Simulation() override;
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// Calls fn(rank) on a thread for each rank, and returns when all have ended.
  void run(int ranks, const std::function<void(int rank)>& fn);

  /// Of a thread that run() has made: a little time goes by, and others may go on.
  void pass();
  void sleep(std::chrono::nanoseconds time);

  bool chance(unsigned of) { return draw() % of == 0; }
  int below(int end) { return static_cast<int>(draw() % static_cast<uint64_t>(end)); }

  /// What went on, for whoever replays a seed. `what()` is called where a story is kept.
  void remember(const std::function<std::string()>& what);
  std::string story() const;

  base::Time now() override { return now_; }
  uint64_t draw() override { return random_(); }
  void notify(const void* condition) override;
  bool wait(const void* condition, base::Time deadline) override;
  void await(const std::function<bool()>& done) override;
  void add(const void* who) override;
  void begin(const void* who) override;
  void end() override;

 private:
  struct Thread {
    const void* who = nullptr;
    bool waits = false;
    const void* condition = nullptr;
    const std::function<bool()>* done = nullptr;
    std::optional<base::Time> deadline = {};
    std::condition_variable changed = {};
  };
  using Lock = std::unique_lock<std::mutex>;

  Thread& me();
  bool is_able(const Thread& one) const;
  void choose();  ///< who goes on; where nobody can, it becomes as late as somebody waits for
  void give(Lock& lock);
  void wait_for_turn(Lock& lock, int number);

  std::mutex mutex_;
  std::mt19937_64 random_;
  std::map<int, Thread> present_;
  int turn_ = -1, next_ = 0;
  base::Time now_{};
  const bool with_story_;
  std::vector<std::string> story_;
};

}  // namespace shardow::simulated
