// One living save to a path. What no living save holds a lock on, a dead one has left.
#pragma once

#include <chrono>

#include "base/file_lock.h"

namespace shardow::file {

using Until = std::chrono::steady_clock::time_point;

/// A lock on a file of ours beside the path, `.<name>.lock.tmp`, which whoever holds it removes at the end. No lock is
/// ever taken on a file or directory of the user's. On storage without locks nobody waits.
class PathLock {
 public:
  /// Waits for a living save to `path`. Throws kTimeout with the name of the lock at `until`, kIo where the lock's file
  /// cannot be made, or its path has something else.
  PathLock(const base::Path& path, Until until);
  ~PathLock();
  PathLock(const PathLock&) = delete;
  PathLock& operator=(const PathLock&) = delete;

  const base::Path& path() const noexcept { return path_; }  ///< of the lock's file
  bool held() const noexcept { return lock_.held(); }        ///< else the storage has no locks

 private:
  const base::Path path_;
  bool made_ = false;
  base::FileLock lock_;
};

/// Whether a living save may hold the lock at `lock_path`. What a dead one left there is removed.
bool is_locked(const base::Path& lock_path);

}  // namespace shardow::file
