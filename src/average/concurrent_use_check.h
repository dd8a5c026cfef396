// Detects that two threads use an Average at a time, and fails; it does not block. Threads that only read figures wait
// for each other and for the user, and the user for them. Threads exchange one word and take no lock; the release at
// the end orders a thread's work before the next thread's.
#pragma once

#include <atomic>
#include <chrono>
#include <string>

#include "base/errors.h"
#include "base/turns.h"

namespace shardow::average {

class ConcurrentUseCheck {
 public:
  explicit ConcurrentUseCheck(std::string whose) : whose_(std::move(whose)) {}

  /// Releases the check at its end, where it is the outermost of its thread.
  class Hold {
   public:
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   protected:
    Hold(ConcurrentUseCheck& guard, const void* mark, const void* own) : guard_(guard), user_(guard.claim(mark, own)) {}
    ~Hold() {
      if (user_ == nullptr) guard_.user_.store(nullptr, std::memory_order_release);
    }

    ConcurrentUseCheck& guard_;
    const void* const user_;  // before
  };

  /// A thread that reads figures, which no thread writes while this lives.
  class Look : Hold {
   public:
    explicit Look(ConcurrentUseCheck& guard) : Hold(guard, &reading_, &mark_) {}
  };

  /// A thread that is the user while this lives; calls within calls are the same use.
  class Use : Hold {
   public:
    Use(ConcurrentUseCheck& guard, const char* call) : Hold(guard, &mark_, nullptr) {
      if (user_ == nullptr || user_ == &mark_) return;
      base::fail(Code::kInvalidArgument,
                 "{} of the averages of {} while another thread is in a call of theirs: one thread uses an Average at "
                 "a time; let the threads take turns (a std::mutex around the calls)",
                 call, guard_.whose_);
    }
  };

 private:
  /// Returns null where `mark` has replaced null, else the mark that stays. Waits for readers to end; a reader waits
  /// for every user but its `own` thread.
  const void* claim(const void* mark, const void* own) {
    for (;;) {
      const void* user = nullptr;
      if (user_.compare_exchange_strong(user, mark, std::memory_order_acquire)) return nullptr;
      if (user != &reading_ && (mark != &reading_ || user == own)) return user;
      base::sleep_for(std::chrono::microseconds(20));
    }
  }

  static inline char reading_ = 0;            // its address is every reader's
  static inline thread_local char mark_ = 0;  // its address is the thread's

  const std::string whose_;  // never changes: other threads read it
  std::atomic<const void*> user_{nullptr};
};

}  // namespace shardow::average
