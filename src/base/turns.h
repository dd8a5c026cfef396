// How one thread waits for another. Everything in the engine by which a Worker and its owner wait for each other goes through await(), so
// that a test can say which of them goes on, and when: then one seed replays an interleaving.
#pragma once

#include <atomic>
#include <functional>

namespace shardow::base {

/// For tests: threads of Workers and of their owners go on one at a time. Whoever calls anything of this has the turn.
class Turns {
 public:
  virtual ~Turns() = default;
  virtual void add(const void* who) = 0;                      ///< the thread of this Worker takes turns from here on
  virtual void begin(const void* who) = 0;                    ///< on that thread: returns when it has been added and has the turn
  virtual void end() = 0;                                     ///< on that thread: it takes turns no more
  virtual void await(const std::function<bool()>& done) = 0;  ///< others have their turns until done()
};

inline Turns* turns = nullptr;

/// Until done(the value).
template <typename T, typename Done>
void await(const std::atomic<T>& state, const Done& done) {
  if (turns != nullptr) return turns->await([&] { return done(state.load(std::memory_order_acquire)); });
  for (T seen; !done(seen = state.load(std::memory_order_acquire));) state.wait(seen, std::memory_order_acquire);
}

}  // namespace shardow::base
