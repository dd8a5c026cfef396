// How one thread waits for another, and what time it is. A Worker and its owner wait for each other by await(), ranks
// in one process by a Condition (mutex.h), deadlines go by now(): so a test can say which of them goes on, and when,
// and one seed replays an interleaving.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <thread>
#include <utility>

namespace shardow::base {

using Time = std::chrono::steady_clock::time_point;

/// For tests: threads of Workers and of their owners, or ranks, go on one at a time. Whoever calls anything of this has
/// the turn.
class Turns {
 public:
  virtual ~Turns() = default;
  virtual void add(const void* who) = 0;    ///< the thread of this Worker takes turns from here on
  virtual void begin(const void* who) = 0;  ///< on that thread: returns when it has been added and has the turn
  virtual void end() = 0;                   ///< on that thread: it takes turns no more
  virtual void await(const std::function<bool()>& done) = 0;  ///< others have their turns until done()

  virtual Time now() { return std::chrono::steady_clock::now(); }
  virtual uint64_t draw() { return std::random_device()(); }  ///< for names that nothing else has
  virtual void notify(const void* /*condition*/) {}           ///< who waits there may go on
  /// Others have their turns until notify(condition) or the deadline, or less long. False if the deadline has passed.
  virtual bool wait(const void* /*condition*/, Time deadline) {
    bool waited = false;
    await([&] { return std::exchange(waited, true); });
    return now() < deadline;
  }
};

inline Turns* turns = nullptr;

inline Time now() {
  return turns != nullptr ? turns->now() : std::chrono::steady_clock::now();
}

/// The end of a timeout, of which a clock can't hold every one: at most ten years from now.
inline Time after(std::chrono::milliseconds timeout) {
  return now() + std::min<std::chrono::milliseconds>(timeout, std::chrono::years(10));
}

inline double seconds_since(Time began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

inline void sleep_for(std::chrono::nanoseconds time) {
  if (turns == nullptr) return std::this_thread::sleep_for(time);
  for (const Time end = now() + time; turns->wait(nullptr, end);) {
  }
}

/// Until done(the value).
template <typename T, typename Done>
void await(const std::atomic<T>& state, const Done& done) {
  if (turns != nullptr) return turns->await([&] { return done(state.load(std::memory_order_acquire)); });
  for (T seen; !done(seen = state.load(std::memory_order_acquire));) state.wait(seen, std::memory_order_acquire);
}

}  // namespace shardow::base
