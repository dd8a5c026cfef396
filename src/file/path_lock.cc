#include "file/path_lock.h"

#include <cerrno>

#include "base/errors.h"
#include "base/paths.h"
#include "base/turns.h"
#include "file/names.h"

namespace shardow::file {
namespace {

using base::FileLock;
using base::Path;
using Result = FileLock::Result;

constexpr std::chrono::milliseconds kPause{20};

/// At once. A file that its holder removed between our opening it and our lock is not the lock any more.
Result take(FileLock& lock, const Path& path) {
  Result result = lock.take(path);
  while (result == Result::kHeld && !lock.is_at(path)) result = lock.take(path);
  return result;
}

/// False where somebody else has made it meanwhile.
bool make(const Path& path) {
  try {
    static_cast<void>(base::File::create(path));
    return true;
  } catch (const Error& error) {
    if (error.os_errno() != EEXIST) throw;
    return false;
  }
}

/// Whoever waits for it finds out that it is gone, and makes another one.
void remove(FileLock& lock, const Path& path) noexcept {
  if (!base::syscalls().left_one()) base::remove_tree(path);
  lock.release();
}

}  // namespace

PathLock::PathLock(const Path& path, Until until) : path_(lock_path(path)) {
  for (;;) {
    const Result result = take(lock_, path_);
    if (result == Result::kHeld || result == Result::kUnknown) return;
    if (result == Result::kNoLock) {
      base::fail(Code::kIo,
                 "{}: {} is in the way, where a save to this path makes and locks an empty file; remove it, or "
                 "save to another name",
                 path.string(), path_.string());
    }
    if (result == Result::kGone) {
      made_ = make(path_);
      continue;
    }
    if (base::now() >= until) {
      base::fail(Code::kTimeout,
                 "{}: another save to this path is under way and does not end: a living process holds {}. Save from "
                 "one rank, to one path per model; ranks that hold parts or copies of one model save together, with "
                 "the wrapped model or with group=",
                 path.string(), path_.string());
    }
    base::sleep_for(kPause);
  }
}

PathLock::~PathLock() {
  if (made_ || lock_.held()) remove(lock_, path_);
}

bool is_locked(const Path& lock_path) {
  FileLock lock;
  const Result result = take(lock, lock_path);
  if (result == Result::kHeld) remove(lock, lock_path);
  return result != Result::kHeld && result != Result::kGone;
}

}  // namespace shardow::file
