// System calls that may never return, each on a thread that can be left: storage of a network, or of a program, stands
// still where its server does, and no signal ends the wait.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/caller.h"
#include "base/files.h"
#include "base/left_names.h"
#include "base/mutex.h"

namespace shardow::base {

/// The machine's own calls: one that has not returned after `patience` fails with ETIMEDOUT, and goes on where nobody
/// looks. What it reads or looks up is its own by then; of the memory that it writes to a file, a draft, it may still
/// read. Its descriptor is closed when it returns, and refused until then. A call that changes names may do so hours
/// later: may_still_change() (left_names.h) says where. The next one that does not return costs a moment, and after
/// that none is made any more but closing, which nobody waits for then. Where there is no memory for a call it fails
/// with ENOMEM, and closing is done all the same: nothing here throws. Threads may share one.
class TimedCalls : public Syscalls {
 public:
  explicit TimedCalls(std::chrono::milliseconds patience) : patience_(patience) {}
  ~TimedCalls() override;
  bool left_one() const noexcept override { return left_one_; }
  TimedCalls(const TimedCalls&) = delete;
  TimedCalls& operator=(const TimedCalls&) = delete;

  int open(const char* path, int flags, mode_t mode) override;
  int openat(int directory, const char* name, int flags, mode_t mode) override;
  int close(int fd) override;
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override;
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override;
  int ftruncate(int fd, off_t length) override;
  int fsync(int fd) override;
  int flock(int fd, int operation) override;
  int sync_file_range(int fd, off_t offset, off_t bytes, unsigned flags) override;
  int rename(const char* from, const char* to) override;
  int rename_exchange(const char* a, const char* b) override;
  int mkdir(const char* path, mode_t mode) override;
  int link(const char* from, const char* to) override;
  int unlink(const char* path) override;
  int rmdir(const char* path) override;
  int list(const char* path, std::vector<std::string>* names) override;
  int statfs(const char* path, struct statfs* out) override;
  int stat(const char* path, struct stat* out) override;
  int lstat(const char* path, struct stat* out) override;

 protected:
  using Call = Caller::Call;

  /// A call on a descriptor.
  ssize_t on(int fd, Call call);

 private:
  using Returned = Caller::Returned;

  Returned make(Call call, Caller::Late late = {});
  ssize_t changing(std::string first, std::string second, Call call);  ///< a call that changes these names
  template <class Out>
  int asked(int (Syscalls::*call)(const char*, Out*), const char* path, Out* out);
  std::shared_ptr<Caller> free_caller();

  std::atomic<std::chrono::milliseconds> patience_;
  std::atomic<bool> left_one_{false};
  Mutex mutex_;
  size_t num_callers_ SHARDOW_GUARDED_BY(mutex_) = 0;  ///< for so many there is room in free_
  size_t num_on_ SHARDOW_GUARDED_BY(mutex_) = 0;  ///< for so many more, calls on descriptors, there is room in busy_
  std::vector<std::shared_ptr<Caller>> free_ SHARDOW_GUARDED_BY(mutex_);
  std::vector<int> busy_
      SHARDOW_GUARDED_BY(mutex_);  ///< descriptors that a call has which nobody waits for any more: it closes them
};

}  // namespace shardow::base
