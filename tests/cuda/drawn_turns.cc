#include "drawn_turns.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "fake.h"

namespace shardow::fake {
namespace {

thread_local int mine = 0;

}  // namespace

DrawnTurns::DrawnTurns(uint64_t seed)
    : random_(seed), stays_(1 + static_cast<unsigned>(random_() % 8)), present_{{nullptr, 0}} {
  mine = 0;
  base::turns = this;
  between = [this] { pass(); };
}

DrawnTurns::~DrawnTurns() {
  base::turns = nullptr;
  between = nullptr;
}

void DrawnTurns::add(const void* who) {
  const Lock lock(mutex_);
  present_.emplace_back(who, next_++);
  changed_.notify_all();
}

void DrawnTurns::begin(const void* who) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] {
    const auto found =
        std::find_if(present_.begin(), present_.end(), [&](const auto& one) { return one.first == who; });
    return found != present_.end() && (mine = found->second) == turn_;
  });
}

void DrawnTurns::end() {
  const Lock lock(mutex_);
  std::erase_if(present_, [](const auto& one) { return one.second == mine; });
  turn_ = present_[random_() % present_.size()].second;
  changed_.notify_all();
}

void DrawnTurns::await(const std::function<bool()>& done) {
  while (!done()) {
    Lock lock(mutex_);
    if (present_.size() == 1) {
      std::fprintf(stderr, "a thread waits for another one, and there is none\n");
      std::abort();
    }
    give(lock, true);
  }
}

void DrawnTurns::pass() {
  Lock lock(mutex_);
  if (present_.size() > 1 && random_() % stays_ == 0) give(lock, false);
}

/// Returns when this thread has the turn again.
void DrawnTurns::give(Lock& lock, bool others_only) {
  const int me = mine;
  do {
    turn_ = present_[random_() % present_.size()].second;
  } while (others_only && turn_ == me);
  if (turn_ == me) return;
  changed_.notify_all();
  changed_.wait(lock, [&] { return turn_ == me; });
}

}  // namespace shardow::fake
