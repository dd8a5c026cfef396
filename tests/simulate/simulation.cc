#include "simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace shardow::simulated {
namespace {

thread_local int mine = -1;

}  // namespace

Simulation::Simulation(uint64_t seed, bool with_story)
    : random_(seed), now_(std::chrono::hours(1)), with_story_(with_story) {
  base::turns = this;
}

Simulation::~Simulation() {
  base::turns = nullptr;
}

void Simulation::run(int ranks, const std::function<void(int)>& fn) {
  const int first = next_;
  for (int rank = 0; rank < ranks; ++rank) present_[next_++].slow = chance(4);
  {
    Lock lock(mutex_);  // ranks may start others meanwhile
    for (int rank = 0; rank < ranks; ++rank) launch(first + rank, [&fn, rank] { fn(rank); });
    pass_on(lock);
  }
  for (;;) {
    std::thread thread;
    {
      const Lock lock(mutex_);
      if (threads_.empty()) return;
      thread = std::move(threads_.front());
      threads_.pop_front();
    }
    thread.join();
  }
}

void Simulation::launch(int number, std::function<void()> fn) {
  Thread& one = present_.at(number);
  threads_.emplace_back([this, number, &one, fn = std::move(fn)]() mutable {
    mine = number;
    take(one);
    fn();
    fn = nullptr;  // what it holds goes while it has the turn
    end();
  });
}

int Simulation::start(std::function<void()> fn) {
  const Lock lock(mutex_);
  present_[next_].slow = chance(4);
  launch(next_, std::move(fn));
  return next_++;
}

void Simulation::join(int thread) {
  await([&] { return !present_.contains(thread); });
}

void Simulation::pass() {
  Lock lock(mutex_);
  now_ += std::chrono::microseconds(chooser_ ? 1 : random_() % 200);
  give(lock);
}

void Simulation::sleep(std::chrono::nanoseconds time) {
  for (const base::Time end = now_ + time; wait(nullptr, end);) {
  }
}

void Simulation::remember(const std::function<std::string()>& what) {
  if (with_story_)
    story_.push_back(
        fmt::format("{:10.4f} s  {}", std::chrono::duration<double>(now_.time_since_epoch()).count() - 3600, what()));
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
  if (done()) return;
  Lock lock(mutex_);
  me().waits = true;
  me().done = &done;
  give(lock);
}

void Simulation::add(const void* who) {
  const Lock lock(mutex_);
  present_[next_++].who = who;
  added_.notify_all();
}

void Simulation::begin(const void* who) {
  Lock lock(mutex_);
  const auto is_it = [&](const auto& one) { return one.second.who == who; };
  auto found = present_.end();
  added_.wait(lock, [&] { return (found = std::find_if(present_.begin(), present_.end(), is_it)) != present_.end(); });
  mine = found->first;
  lock.unlock();
  take(found->second);
}

void Simulation::end() {
  Lock lock(mutex_);
  present_.erase(mine);
  pass_on(lock);
}

Simulation::Thread& Simulation::me() {
  return present_.at(mine);
}

bool Simulation::is_able(const Thread& one) const {
  return !one.waits || (one.done != nullptr && (*one.done)()) || (one.deadline && now_ >= *one.deadline);
}

Simulation::Thread* Simulation::choose() {
  if (present_.empty()) return nullptr;
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
  if (chooser_) {
    const auto stays = std::find(able.begin(), able.end(), mine);
    const bool can_stay = stays != able.end();
    if (can_stay) std::rotate(able.begin(), stays, stays + 1);
    turn_ = able[able.size() == 1 ? 0 : chooser_(able.size(), can_stay)];
  } else {
    turn_ = drawn(able);
  }
  return &present_.at(turn_);
}

int Simulation::drawn(std::vector<int>& able) {
  const auto is_slow = [&](int number) { return present_.at(number).slow; };
  if (able.size() > 1 && random_() % 16 != 0 && !std::all_of(able.begin(), able.end(), is_slow))
    std::erase_if(able, is_slow);
  return able[random_() % able.size()];
}

void Simulation::give(Lock& lock) {
  Thread& one = me();
  Thread* const next = choose();
  if (next != &one) {
    lock.unlock();  // first: who is woken would wait for it
    ::sem_post(&next->turn);
    take(one);
    lock.lock();
  }
  one.waits = false;
  one.condition = nullptr;
  one.done = nullptr;
  one.deadline.reset();
}

void Simulation::pass_on(Lock& lock) {
  Thread* const next = choose();
  lock.unlock();
  if (next != nullptr) ::sem_post(&next->turn);
}

void Simulation::take(Thread& one) {
  while (::sem_wait(&one.turn) != 0) {
  }
}

}  // namespace shardow::simulated
