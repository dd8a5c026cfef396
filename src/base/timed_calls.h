// System calls that may never return, each on a thread that can be left: storage of a network, or of a program, stands
// still where its server does, and no signal ends the wait.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/mutex.h"

namespace shardow::base {

/// A thread that makes one system call at a time, and is left with it where that does not return. It has a share of
/// itself, since it may outlive whoever waited. Nothing of it throws but start().
class Caller {
 public:
  using Call = std::function<ssize_t()>;  ///< owns what it uses; one that throws has failed with ENOMEM

  struct Returned {
    ssize_t result;
    int error;
    bool left = false;  ///< it has not returned, and nobody waits any more
  };

  /// Throws std::system_error where the machine refuses a thread, std::bad_alloc where it has no memory for one.
  static std::shared_ptr<Caller> start();

  /// Returns once the call has returned and what it owned is gone, or at `until`.
  Returned make(Call call, Time until) noexcept;

  /// The thread ends.
  void leave() noexcept;

 private:
  void work() noexcept;

  Mutex mutex_;
  Condition changed_;
  Call call_ SHARDOW_GUARDED_BY(mutex_);
  std::optional<Returned> done_ SHARDOW_GUARDED_BY(mutex_);
  bool left_ SHARDOW_GUARDED_BY(mutex_) = false;
};

/// A share of an open file: the last one closes it, where it has its number.
struct Descriptor {
  int fd = -1;
  Descriptor() = default;
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};

/// A system call that changes what lies at these paths, for as long as it may. Made and destroyed on any thread.
class NameChange {
 public:
  explicit NameChange(std::string first, std::string second = {});
  ~NameChange();
  NameChange(const NameChange&) = delete;
  NameChange& operator=(const NameChange&) = delete;

  void leave() noexcept;  ///< nobody waits for it any more

 private:
  friend bool may_still_change(const Path& path);
  const std::string first_, second_;
  bool left_ = false;
};

/// Returns what fn() does; where there is no memory for it, a failure.
template <class Result = ssize_t, class Fn>
Result with_memory(const Fn& fn) noexcept {
  try {
    return static_cast<Result>(fn());
  } catch (const std::exception&) {
    errno = ENOMEM;
    return -1;
  }
}

inline const char* lent(const std::string& text) {
  return text.c_str();
}
template <class Arg>
Arg lent(const Arg& arg) {
  return arg;
}

/// Returns a call of the machine's own with these arguments. It owns its texts.
template <class Result, class... Args>
Caller::Call bound(Result (Syscalls::*call)(Args...), std::type_identity_t<Args>... args) {
  using Owned = std::tuple<std::conditional_t<std::is_same_v<Args, const char*>, std::string, Args>...>;
  return [call, owned = Owned(args...)]() -> ssize_t {
    Syscalls machine;
    return std::apply([&](const auto&... arg) { return (machine.*call)(lent(arg)...); }, owned);
  };
}

/// The machine's own calls: one that has not returned after `patience` fails with ETIMEDOUT, and goes on where nobody
/// looks. What it reads or looks up is its own by then; of the memory that it writes to a file, a draft, it may still
/// read. Its descriptor is closed when it returns, and what it opens late at once. A call that changes names may do so
/// hours later: may_still_change() says where. After it none is made any more but closing, which nobody waits for
/// then. Where there is no memory for a call it fails with ENOMEM, and closing is done all the same: nothing here
/// throws. Threads may share one.
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
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    return on(&Syscalls::pwrite, fd, data, bytes, offset);
  }
  int ftruncate(int fd, off_t length) override { return on(&Syscalls::ftruncate, fd, length); }
  int fsync(int fd) override { return on(&Syscalls::fsync, fd); }
  int flock(int fd, int operation) override { return on(&Syscalls::flock, fd, operation); }
  int sync_file_range(int fd, off_t offset, off_t bytes, unsigned flags) override {
    return on(&Syscalls::sync_file_range, fd, offset, bytes, flags);
  }
  int rename(const char* from, const char* to) override { return changing(from, to, &Syscalls::rename, from, to); }
  int mkdir(const char* path, mode_t mode) override { return changing(path, "", &Syscalls::mkdir, path, mode); }
  int link(const char* from, const char* to) override { return changing(to, "", &Syscalls::link, from, to); }
  int unlink(const char* path) override { return changing(path, "", &Syscalls::unlink, path); }
  int rmdir(const char* path) override { return changing(path, "", &Syscalls::rmdir, path); }
  int list(const char* path, std::vector<std::string>* names) override { return asked(&Syscalls::list, path, names); }
  int statfs(const char* path, struct statfs* out) override { return asked(&Syscalls::statfs, path, out); }
  int stat(const char* path, struct stat* out) override { return asked(&Syscalls::stat, path, out); }
  int lstat(const char* path, struct stat* out) override { return asked(&Syscalls::lstat, path, out); }

 protected:
  using Call = Caller::Call;

  /// A call on a descriptor. Throws std::bad_alloc.
  ssize_t on(int fd, Call call);

 private:
  using Returned = Caller::Returned;

  template <class Result, class... Args>
  Result on(Result (Syscalls::*call)(int, Args...), int fd, std::type_identity_t<Args>... args) {
    return with_memory<Result>([&] { return on(fd, bound(call, fd, args...)); });
  }

  /// A call that changes these names.
  template <class... Args>
  int changing(const char* first, const char* second, int (Syscalls::*call)(Args...),
               std::type_identity_t<Args>... args) {
    return with_memory<int>(
        [&] { return changing(std::make_shared<NameChange>(first, second), bound(call, args...)); });
  }

  /// A call whose answer is more than a number.
  template <class Out>
  int asked(int (Syscalls::*call)(const char*, Out*), const char* path, Out* out) {
    return with_memory<int>([&] {
      const auto answer = std::make_shared<Out>();
      const ssize_t result = with_errno(make([answer, ask = bound(call, path, answer.get())] { return ask(); }));
      if (result == 0) *out = std::move(*answer);
      return result;
    });
  }

  /// Kept for a descriptor from the first call that has it until it is closed.
  struct Use {
    std::weak_ptr<Descriptor> calls;  ///< those under way have a share
    bool left = false;                ///< to one of them, which closes it
  };

  static ssize_t with_errno(const Returned& returned) noexcept;  ///< as a system call does
  Returned make(Call call);
  ssize_t changing(const std::shared_ptr<NameChange>& change, Call call);
  ssize_t opening(const std::shared_ptr<NameChange>& change, Call call);
  std::shared_ptr<Caller> free_caller();

  const std::chrono::milliseconds patience_;
  std::atomic<bool> left_one_{false};
  Mutex mutex_;
  size_t num_callers_ SHARDOW_GUARDED_BY(mutex_) = 0;  ///< for so many there is room in free_
  std::vector<std::shared_ptr<Caller>> free_ SHARDOW_GUARDED_BY(mutex_);
  std::map<int, Use> uses_ SHARDOW_GUARDED_BY(mutex_);
};

/// Whether a call of this process that was left has not returned yet, and may change what lies at `path`, or in it,
/// when it does.
bool may_still_change(const Path& path);

}  // namespace shardow::base
