// A thread that makes one system call at a time, and is left with it where that does not return.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>

#include "base/mutex.h"

namespace shardow::base {

/// It has a share of itself, since it may outlive whoever waited. Nothing of it throws but start().
class Caller {
 public:
  using Call = std::function<ssize_t()>;  ///< owns what it uses; one that throws has failed with ENOMEM
  using Late = std::function<void(ssize_t)>;

  struct Returned {
    ssize_t result;
    int error;
    bool left = false;  ///< it has not returned, and nobody waits any more
  };

  /// Throws std::system_error where the machine refuses a thread, std::bad_alloc where it has no memory for one.
  static std::shared_ptr<Caller> start();

  /// `late`: called with the result, where nobody waited for that; with -1 where the call was not even made.
  Returned make(Call call, Late late, Time until) noexcept;

  /// A last call, which nobody waits for.
  void make_last(Call call) noexcept;

  /// The thread ends.
  void leave() noexcept;

 private:
  void work() noexcept;

  Mutex mutex_;
  Condition changed_;
  Call call_ SHARDOW_GUARDED_BY(mutex_);
  Late late_ SHARDOW_GUARDED_BY(mutex_);
  std::optional<Returned> done_ SHARDOW_GUARDED_BY(mutex_);
  bool left_ SHARDOW_GUARDED_BY(mutex_) = false;
};

}  // namespace shardow::base
