// Ranks as threads, of which exactly one goes on at a time, with a clock of their own: who goes on, how long everything
// takes and what the system would draw at random are functions of one seed.
#pragma once

#include <semaphore.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "seams.h"

namespace shardow::simulated {

using std::chrono::milliseconds;

class Simulation final : public base::Turns {
 public:
  /// `with_story`: remember() keeps what it is told.
  explicit Simulation(uint64_t seed, bool with_story = false);
  ~Simulation() override;
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// In place of the seed, who goes on: one of `able`, by its place. `stays`: the first of them is who has the turn
  /// now; the others follow in the order in which they began.
  using Chooser = std::function<size_t(size_t able, bool stays)>;
  void choose_by(Chooser chooser) { chooser_ = std::move(chooser); }

  /// Calls fn(rank) on a thread for each rank, and returns when all have ended, with what they have started.
  void run(int ranks, const std::function<void(int rank)>& fn);

  // Of a thread that run() has made, or start().
  int start(std::function<void()> fn);  ///< on a thread of its own; its number
  void join(int thread);
  void pass();  ///< a little time goes by, and others may go on
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
    bool slow = false;  ///< one in four: others that can go on mostly do
    bool waits = false;
    const void* condition = nullptr;
    const std::function<bool()>* done = nullptr;
    std::optional<base::Time> deadline = {};
    sem_t turn = {};  ///< posted by whoever gives it the turn: on one processor half the price of a condition
    Thread() { ::sem_init(&turn, 0, 0); }
    ~Thread() { ::sem_destroy(&turn); }
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;
  };
  using Lock = std::unique_lock<std::mutex>;

  void launch(int number, std::function<void()> fn);
  int drawn(std::vector<int>& able);
  Thread& me();
  bool is_able(const Thread& one) const;
  Thread* choose();  ///< who goes on, if anybody is left; where nobody can, it becomes as late as somebody waits for
  void give(Lock& lock);
  void pass_on(Lock& lock);
  static void take(Thread& one);  ///< its turn

  std::mutex mutex_;
  std::mt19937_64 random_;
  Chooser chooser_;
  std::map<int, Thread> present_;
  std::deque<std::thread> threads_;
  std::condition_variable added_;
  int turn_ = -1, next_ = 0;
  base::Time now_{};
  const bool with_story_;
  std::vector<std::string> story_;
};

}  // namespace shardow::simulated
