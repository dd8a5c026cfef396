// Room for whatever must be remembered when a call is left is made before the call is: there may be no memory by then.
#include "base/timed_calls.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <set>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/paths.h"

namespace shardow::base {
namespace {

constexpr size_t kMostRead = size_t{1} << 20;  // at a time: it is copied once more, while it is in the cache

struct Changes {
  Mutex mutex;
  std::set<const NameChange*> all SHARDOW_GUARDED_BY(mutex);
};

Changes& changes() {
  static Changes& made = *new Changes;  // never destroyed: what was left may return after all that is static has gone
  return made;
}

}  // namespace

ssize_t TimedCalls::with_errno(const Returned& returned) noexcept {
  errno = returned.error;
  return returned.result;
}

TimedCalls::~TimedCalls() {
  const Lock lock(mutex_);
  for (const auto& one : free_) one->leave();
}

std::shared_ptr<Caller> TimedCalls::free_caller() {
  const Lock lock(mutex_);
  if (!free_.empty()) {
    auto found = std::move(free_.back());
    free_.pop_back();
    return found;
  }
  free_.reserve(num_callers_ + 1);
  auto made = Caller::start();
  ++num_callers_;
  return made;
}

TimedCalls::Returned TimedCalls::make(Call call) {
  if (left_one_) return {-1, ETIMEDOUT};
  std::shared_ptr<Caller> caller;
  try {
    caller = free_caller();
  } catch (const std::exception&) {  // the machine refuses a thread, or memory for it
    const ssize_t result = call();
    return {result, errno};
  }
  const Returned returned = caller->make(std::move(call), base::after(patience_));
  const Lock lock(mutex_);
  if (returned.left) {
    --num_callers_;
    left_one_ = true;
  } else {
    free_.push_back(std::move(caller));
  }
  return returned;
}

/// A call on a descriptor, whose number must not come to mean another file while the call may use it.
ssize_t TimedCalls::on(int fd, Call call) {
  std::shared_ptr<Descriptor> own;
  {
    const Lock lock(mutex_);
    Use& use = uses_[fd];
    if (!(own = use.calls.lock())) use.calls = own = std::make_shared<Descriptor>();
  }
  const Returned returned = make([own, call = std::move(call)] { return call(); });
  if (returned.left) {
    const Lock lock(mutex_);
    uses_[fd].left = true;
    own->fd = fd;
  }
  return with_errno(returned);
}

ssize_t TimedCalls::changing(const std::shared_ptr<NameChange>& change, Call call) {
  const Returned returned = make([change, call = std::move(call)] { return call(); });
  if (returned.left && change) change->leave();
  return with_errno(returned);
}

/// A call that opens, and changes this name where there is one. What it opens late is closed with it.
ssize_t TimedCalls::opening(const std::shared_ptr<NameChange>& change, Call call) {
  const auto opened = std::make_shared<Descriptor>();
  const ssize_t result =
      changing(change, [opened, call = std::move(call)] { return opened->fd = static_cast<int>(call()); });
  if (result >= 0) opened->fd = -1;
  return result;
}

int TimedCalls::open(const char* path, int flags, mode_t mode) {
  return with_memory<int>([&] {
    const bool changes_name = (flags & (O_CREAT | O_TRUNC)) != 0;
    return opening(changes_name ? std::make_shared<NameChange>(path) : nullptr,
                   bound(&Syscalls::open, path, flags, mode));
  });
}

int TimedCalls::openat(int directory, const char* name, int flags, mode_t mode) {
  return with_memory<int>([&] {
    const auto own = std::make_shared<Descriptor>();
    own->fd = ::fcntl(directory, F_DUPFD_CLOEXEC, 0);
    if (own->fd < 0) return with_errno({-1, errno});
    Call call = bound(&Syscalls::openat, own->fd, name, flags, mode);
    return opening(nullptr, [own, call = std::move(call)] { return call(); });
  });
}

int TimedCalls::close(int fd) {
  {
    const Lock lock(mutex_);
    if (const auto use = uses_.extract(fd); !use.empty() && use.mapped().left) {
      errno = ETIMEDOUT;
      return -1;
    }
  }
  const auto close = [fd] { return Syscalls().close(fd); };
  if (!left_one_) return static_cast<int>(with_errno(make(close)));
  try {  // or what failed would keep its space until the process ends
    std::thread(close).detach();
  } catch (const std::exception&) {
  }
  errno = ETIMEDOUT;
  return -1;
}

/// What is in memory by now is read at once; what is not, into memory that whoever is left has a share of.
ssize_t TimedCalls::pread(int fd, void* data, size_t bytes, off_t offset) {
  iovec into{data, bytes};
  const ssize_t at_once = left_one_ ? 0 : ::preadv2(fd, &into, 1, offset, RWF_NOWAIT);
  if (at_once > 0) return at_once;
  return with_memory([&] {
    const size_t most = std::min(bytes, kMostRead);
    const std::shared_ptr<std::byte[]> found(new std::byte[most]);
    const ssize_t done = on(fd, [=] { return Syscalls().pread(fd, found.get(), most, offset); });
    if (done > 0) std::memcpy(data, found.get(), static_cast<size_t>(done));
    return done;
  });
}

std::shared_ptr<Caller> Caller::start() {
  auto made = std::make_shared<Caller>();
  std::thread([made] { made->work(); }).detach();
  return made;
}

Descriptor::~Descriptor() {
  if (fd >= 0) ::close(fd);
}

Caller::Returned Caller::make(Call call, Time until) noexcept {
  const Lock lock(mutex_);
  call_ = std::move(call);
  done_.reset();
  changed_.notify_all();
  while (!done_ && changed_.wait_until(mutex_, until)) {
  }
  if (done_) return *done_;
  left_ = true;  // the thread ends with the call
  call_ = nullptr;
  changed_.notify_all();
  return {-1, ETIMEDOUT, true};
}

void Caller::leave() noexcept {
  const Lock lock(mutex_);
  left_ = true;
  changed_.notify_all();
}

void Caller::work() noexcept {
  const auto made = [](const Call& call) -> Returned {
    try {
      const ssize_t result = call();
      return {result, errno};
    } catch (const std::exception&) {  // no memory for what it found
      return {-1, ENOMEM};
    }
  };
  mutex_.lock();
  while (!left_ || call_) {
    if (!call_) {
      changed_.wait_until(mutex_, base::now() + std::chrono::hours(1));
      continue;
    }
    Call call = std::exchange(call_, nullptr);
    mutex_.unlock();
    const Returned now = made(call);
    call = nullptr;  // what it owns is gone before anybody learns that it returned
    mutex_.lock();
    done_ = now;
    changed_.notify_all();
  }
  mutex_.unlock();
}

NameChange::NameChange(std::string first, std::string second) : first_(std::move(first)), second_(std::move(second)) {
  const Lock lock(changes().mutex);
  changes().all.insert(this);
}

NameChange::~NameChange() {
  const Lock lock(changes().mutex);
  changes().all.erase(this);
}

void NameChange::leave() noexcept {
  const Lock lock(changes().mutex);
  left_ = true;
}

bool may_still_change(const Path& path) {
  const Lock lock(changes().mutex);
  const auto is_there = [&](const Path& name) { return name == path || parent_of(name) == path; };
  const auto is_of = [&](const NameChange* one) {
    return one->left_ && (is_there(one->first_) || is_there(one->second_));
  };
  return std::any_of(changes().all.begin(), changes().all.end(), is_of);
}

}  // namespace shardow::base
