#include "simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace shardow::simulated {
namespace {

thread_local int mine = -1;

}  // namespace

Simulation::Simulation(uint64_t seed, bool with_story) : random_(seed), now_(std::chrono::hours(1)), with_story_(with_story) {
  base::turns = this;
}

Simulation::~Simulation() {
  base::turns = nullptr;
}

void Simulation::run(int ranks, const std::function<void(int)>& fn) {
  for (int rank = 0; rank < ranks; ++rank) present_[next_++];
  choose();
  std::vector<std::thread> threads;
  const int first = next_ - ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      {
        Lock lock(mutex_);
        wait_for_turn(lock, mine = first + rank);
      }
      fn(rank);
      end();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void Simulation::pass() {
  Lock lock(mutex_);
  now_ += std::chrono::microseconds(random_() % 200);
  give(lock);
}

void Simulation::sleep(std::chrono::nanoseconds time) {
  for (const base::Time end = now_ + time; wait(nullptr, end);) {
  }
}

void Simulation::remember(const std::function<std::string()>& what) {
  if (with_story_)
    story_.push_back(fmt::format("{:10.4f} s  {}", std::chrono::duration<double>(now_.time_since_epoch()).count() - 3600, what()));
}

std::string Simulation::story() const {
  return fmt::format("{}", fmt::join(story_, "\n"));
}

void Simulation::notify(const void* condition) {
  const Lock lock(mutex_);
  for (auto& [number, one] : present_) {
    if (one.waits && one.condition == condition) one.waits = false;
  }
}

bool Simulation::wait(const void* condition, base::Time deadline) {
  Lock lock(mutex_);
  me().waits = true;
  me().condition = condition;
  me().deadline = deadline;
  give(lock);
  return now_ < deadline;
}

void Simulation::await(const std::function<bool()>& done) {
  Lock lock(mutex_);
  me().waits = true;
  me().done = &done;
  give(lock);
}

void Simulation::add(const void* who) {
  const Lock lock(mutex_);
  present_[next_++].who = who;
  for (auto& [number, one] : present_) one.changed.notify_all();
}

void Simulation::begin(const void* who) {
  Lock lock(mutex_);
  for (auto& [number, one] : present_) {
    if (one.who == who) return wait_for_turn(lock, mine = number);
  }
  std::fprintf(stderr, "a thread takes turns that nobody has added\n");
  std::abort();
}

void Simulation::end() {
  const Lock lock(mutex_);
  present_.erase(mine);
  choose();
}

Simulation::Thread& Simulation::me() {
  return present_.at(mine);
}

bool Simulation::is_able(const Thread& one) const {
  return !one.waits || (one.done != nullptr && (*one.done)()) || (one.deadline && now_ >= *one.deadline);
}

void Simulation::choose() {
  if (present_.empty()) return;
  std::vector<int> able;
  while (able.empty()) {
    std::optional<base::Time> first;
    for (const auto& [number, one] : present_) {
      if (is_able(one)) able.push_back(number);
      if (one.deadline && (!first || *one.deadline < *first)) first = one.deadline;
    }
    if (!able.empty()) break;
    if (!first) {
      std::fprintf(stderr, "%s\neverybody waits, and nobody until some time\n", story().c_str());
      std::abort();
    }
    now_ = *first;
  }
  turn_ = able[random_() % able.size()];
  present_.at(turn_).changed.notify_all();
}

void Simulation::give(Lock& lock) {
  choose();
  wait_for_turn(lock, mine);
  Thread& one = me();
  one.waits = false;
  one.condition = nullptr;
  one.done = nullptr;
  one.deadline.reset();
}

void Simulation::wait_for_turn(Lock& lock, int number) {
  present_.at(number).changed.wait(lock, [&] { return turn_ == number; });
}

}  // namespace shardow::simulated
