// A lock on an empty file (flock): it goes with the file wherever that is renamed to, leaves nothing behind, and ends
// with the process that holds it. Some network mounts keep it to one machine.
#pragma once

#include "base/files.h"

namespace shardow::base {

class FileLock {
 public:
  enum class Result {
    kHeld,
    kOthers,   ///< somebody else holds it: another process, or another FileLock of this one
    kGone,     ///< there is nothing at the path
    kNoLock,   ///< the path has something else than an empty file
    kUnknown,  ///< the storage has no such locks, or the path may not be opened
  };

  FileLock() = default;
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() { release(); }

  Result take(const Path& path);  ///< at once
  bool held() const noexcept { return fd_ >= 0; }
  bool is_at(const Path& path) const;  ///< whether what is held lies at `path` now
  void release() noexcept;             ///< also of what children of this process inherited

 private:
  Result take(const Path& path, int flags);
  int fd_ = -1;
  Syscalls* calls_ = nullptr;  // that it was taken through
};

}  // namespace shardow::base
