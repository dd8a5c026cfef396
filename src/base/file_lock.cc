#include "base/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

namespace shardow::base {

FileLock::Result FileLock::take(const Path& path) {
  const Result result = take(path, O_RDONLY);
  return result == Result::kUnknown ? take(path, O_RDWR) : result;  // NFS locks files that are open for writing
}

FileLock::Result FileLock::take(const Path& path, int flags) {
  release();
  calls_ = &syscalls();
  int fd = -1;
  do fd = calls_->open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    return errno == ENOENT ? Result::kGone : is_of_no_file(errno) ? Result::kNoLock : Result::kUnknown;
  }
  struct stat status {};
  if (::fstat(fd, &status) == 0 && (!S_ISREG(status.st_mode) || status.st_size != 0)) {
    calls_->close(fd);
    return Result::kNoLock;
  }
  int result = -1;
  do result = calls_->flock(fd, LOCK_EX | LOCK_NB);
  while (result != 0 && errno == EINTR);
  if (result == 0) {
    fd_ = fd;
    return Result::kHeld;
  }
  const bool others = errno == EWOULDBLOCK || errno == EACCES;
  calls_->close(fd);
  return others ? Result::kOthers : Result::kUnknown;
}

bool FileLock::is_at(const Path& path) const {
  struct stat locked {
  }, current{};
  return ::fstat(fd_, &locked) == 0 && calls_->lstat(path.c_str(), &current) == 0 && locked.st_ino == current.st_ino &&
         locked.st_dev == current.st_dev;
}

void FileLock::release() noexcept {
  if (fd_ < 0) return;
  calls_->flock(fd_, LOCK_UN);  // closing alone leaves it to a child that was forked meanwhile
  calls_->close(std::exchange(fd_, -1));
}

}  // namespace shardow::base
