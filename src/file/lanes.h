// Threads that read or write beside each other for half a second, until a call tells its ranks how far it is.
#pragma once

#include <atomic>
#include <exception>
#include <functional>

#include "base/mutex.h"

namespace shardow::file {

class Lanes {
 public:
  /// Calls work(0) here and work(1) .. work(count - 1) on threads that see this one's environment; fewer where the
  /// system gives no more, and none where a test says who has the turn. Throws what one of them threw, now and whenever
  /// it is called again.
  void run(size_t count, const std::function<void(size_t lane)>& work);

  bool failed() const noexcept { return failed_; }  ///< the others may end

 private:
  std::atomic<bool> failed_ = false;
  base::Mutex mutex_;
  std::exception_ptr failure_ SHARDOW_GUARDED_BY(mutex_);
};

}  // namespace shardow::file
