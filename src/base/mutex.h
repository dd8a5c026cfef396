// std::mutex with the annotations that libstdc++ lacks, so that clang refuses to touch guarded data without the lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/turns.h"

// Which mutex guards what, checked by clang's -Wthread-safety; nothing elsewhere.
#if defined(__clang__)
#define SHARDOW_ANNOTATE(x) __attribute__((x))
#else
#define SHARDOW_ANNOTATE(x)
#endif

#define SHARDOW_CAPABILITY SHARDOW_ANNOTATE(capability("mutex"))
#define SHARDOW_SCOPED_CAPABILITY SHARDOW_ANNOTATE(scoped_lockable)
#define SHARDOW_GUARDED_BY(mutex) SHARDOW_ANNOTATE(guarded_by(mutex))  // data: touched only while holding `mutex`
#define SHARDOW_REQUIRES(mutex) SHARDOW_ANNOTATE(requires_capability(mutex))  // function: the caller holds `mutex`
#define SHARDOW_ACQUIRE(...) SHARDOW_ANNOTATE(acquire_capability(__VA_ARGS__))
#define SHARDOW_RELEASE(...) SHARDOW_ANNOTATE(release_capability(__VA_ARGS__))
#define SHARDOW_NO_THREAD_SAFETY_ANALYSIS \
  SHARDOW_ANNOTATE(no_thread_safety_analysis)  // function: locks here what is unlocked elsewhere

namespace shardow::base {

class SHARDOW_CAPABILITY Mutex {
 public:
  void lock() SHARDOW_ACQUIRE() { take(mutex_); }
  void unlock() SHARDOW_RELEASE() { mutex_.unlock(); }

 private:
  friend class Condition;

  /// Who takes turns lets others have theirs until whoever has it lets go.
  template <class Lockable>
  static void take(Lockable& lock) {
    if (turns == nullptr) return lock.lock();
    for (std::chrono::microseconds pause{1}; !lock.try_lock(); pause *= 2) turns->wait(nullptr, turns->now() + pause);
  }

  std::mutex mutex_;
};

class SHARDOW_SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(Mutex& mutex) SHARDOW_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~Lock() SHARDOW_RELEASE() { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Mutex& mutex_;
};

class Condition {
 public:
  /// Lets go of `mutex` until notified or until `deadline`; may wake early, so callers look again. False if the
  /// deadline has passed.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline) SHARDOW_REQUIRES(mutex) {
    std::unique_lock<std::mutex> held(mutex.mutex_, std::adopt_lock);
    const bool in_time = turns == nullptr ? condition_.wait_until(held, deadline) == std::cv_status::no_timeout
                                          : turn_by(held, deadline);
    held.release();  // the caller still holds it
    return in_time;
  }
  void notify_all() noexcept {
    if (turns != nullptr) turns->notify(this);
    condition_.notify_all();
  }

 private:
  bool turn_by(std::unique_lock<std::mutex>& held, Time deadline) {
    held.unlock();
    const bool in_time = turns->wait(this, deadline);
    Mutex::take(held);
    return in_time;
  }

  std::condition_variable condition_;
};

}  // namespace shardow::base
