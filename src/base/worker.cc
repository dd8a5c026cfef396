#include "base/worker.h"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/turns.h"

namespace shardow::base {

/// All workers of the process, for fork().
class Workers {
 public:
  static Workers& all() {
    static Workers* const workers = new Workers;  // never destroyed: workers of other static objects may end after it
    return *workers;
  }

  void add(Worker* worker) {
    const Lock lock(mutex_);
    workers_.push_back(worker);
  }

  void remove(Worker* worker) {
    const Lock lock(mutex_);
    std::erase(workers_, worker);
  }

  /// begin(), which no fork comes between.
  template <typename Fn>
  void begin(const Fn& fn) {
    const Lock lock(mutex_);
    fn();
  }

 private:
  Workers() { pthread_atfork(&before_fork, &in_parent, &in_child); }

  static void before_fork() SHARDOW_NO_THREAD_SAFETY_ANALYSIS {
    all().mutex_.lock();
    for (const Worker* worker : all().workers_) worker->settle();
  }

  static void in_parent() SHARDOW_NO_THREAD_SAFETY_ANALYSIS { all().mutex_.unlock(); }

  /// The threads are the parent's: their objects can be neither joined nor detached here, so they are left behind.
  static void in_child() SHARDOW_NO_THREAD_SAFETY_ANALYSIS {
    for (Worker* worker : all().workers_) static_cast<void>(worker->thread_.release());
    all().mutex_.unlock();
  }

  Mutex mutex_;
  std::vector<Worker*> workers_ SHARDOW_GUARDED_BY(mutex_);
};

Worker::Worker() {
  Workers::all().add(this);
}

Worker::~Worker() {
  settle();
  Workers::all().remove(this);
  if (!thread_) return;
  state_.store(kEnd, std::memory_order_release);
  state_.notify_all();
  thread_->join();
}

void Worker::begin(std::function<void()> piece) {
  wait();
  piece_ = std::move(piece);
  bool here = false;
  Workers::all().begin([&] {
    state_.store(kBusy, std::memory_order_release);
    state_.notify_all();
    try {
      if (!thread_) thread_ = std::make_unique<std::thread>([this] { work(); });
    } catch (const std::exception&) {  // no thread or no memory for it
      here = true;
    }
    if (turns != nullptr && !here) turns->add(this);
  });
  if (here) perform();
}

void Worker::wait() {
  settle();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Worker::settle() const noexcept {
  await(state_, [](int state) { return !is_busy(state); });
}

void Worker::part_done() noexcept {
  state_.store(kPartDone, std::memory_order_release);
  state_.notify_all();
}

void Worker::wait_for_part() const noexcept {
  await(state_, [](int state) { return state != kBusy; });
}

void Worker::work() noexcept {
  for (int state; (state = state_.load(std::memory_order_acquire)) != kEnd;) {
    if (state == kBusy) {
      if (turns != nullptr) turns->begin(this);
      perform();
      if (turns != nullptr) turns->end();
    } else {
      state_.wait(state, std::memory_order_acquire);
    }
  }
}

void Worker::perform() noexcept {
  try {
    if (worker_seam) worker_seam();
    piece_();
  } catch (...) {
    error_ = std::current_exception();
  }
  piece_ = nullptr;
  state_.store(kIdle, std::memory_order_release);
  state_.notify_all();
}

}  // namespace shardow::base
