// That one thread at a time uses an Average: found out, not waited for. An exchange of one word, no lock; the release
// at the end orders what one thread did before what the next one does.
#pragma once

#include <atomic>
#include <string>

#include "base/errors.h"

namespace shardow::average {

class OneUser {
 public:
  explicit OneUser(std::string whose) : whose_(std::move(whose)) {}

  /// While it lives its thread is the user; calls within calls are the same use.
  class Use {
   public:
    Use(OneUser& one, const char* call) : one_(one) {
      const void* found = nullptr;
      if (one_.user_.compare_exchange_strong(found, &mark_, std::memory_order_acquire)) return;
      outermost_ = false;
      if (found == &mark_) return;
      base::fail(Code::kInvalidArgument,
                 "{} of the averages of {} while another thread is in a call of theirs: one thread uses an Average at "
                 "a time; let the threads "
                 "take turns (a std::mutex around the calls)",
                 call, one_.whose_);
    }
    ~Use() {
      if (outermost_) one_.user_.store(nullptr, std::memory_order_release);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    OneUser& one_;
    bool outermost_ = true;
  };

 private:
  static inline thread_local char mark_ = 0;  // its address is the thread's

  const std::string whose_;  // never changes: other threads read it
  std::atomic<const void*> user_{nullptr};
};

}  // namespace shardow::average
