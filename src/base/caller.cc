#include "base/caller.h"

#include <cerrno>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace shardow::base {

std::shared_ptr<Caller> Caller::start() {
  auto made = std::make_shared<Caller>();
  std::thread([made] { made->work(); }).detach();
  return made;
}

Caller::Returned Caller::make(Call call, Late late, Time until) noexcept {
  const Lock lock(mutex_);
  call_ = std::move(call);
  late_ = std::move(late);
  done_.reset();
  changed_.notify_all();
  while (!done_ && changed_.wait_until(mutex_, until)) {
  }
  if (done_) return *done_;
  left_ = true;  // the thread ends with the call
  if (std::exchange(call_, nullptr) && late_) late_(-1);
  changed_.notify_all();
  return {-1, ETIMEDOUT, true};
}

void Caller::make_last(Call call) noexcept {
  const Lock lock(mutex_);
  call_ = std::move(call);
  late_ = nullptr;
  left_ = true;
  changed_.notify_all();
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
    if (left_ && late_) late_(now.result);
    changed_.notify_all();
  }
  mutex_.unlock();
}

}  // namespace shardow::base
