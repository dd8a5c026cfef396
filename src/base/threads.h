// Threads that stay: a fixed division of work, always done by the same threads, so that memory stays with the core that
// touched it first.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace shardow::base {

/// How many threads the averages may use: OMP_NUM_THREADS where it is set (the first number of a list), else the
/// processors of the affinity mask, at most 4: a few cores saturate memory, the rest belong to training. At least 1.
/// Reads the environment at every call.
int allowed_threads() noexcept;

/// Where the process has an OpenMP runtime, its threads do the work, but of a pool that wants its own: those of the
/// runtime spin after their work, which a pool in the background should not. Elsewhere, and in a forked child, the pool
/// owns num_threads - 1 workers, started at the first run(), waiting between runs without using a processor. Never pins
/// them. One thread uses a pool at a time, and run() is not called from within run().
class ThreadPool {
 public:
  enum class Threads { kOfTheRuntime, kOwn };
  explicit ThreadPool(int num_threads, Threads threads = Threads::kOfTheRuntime);  ///< throws kInvalidArgument below 1
  ~ThreadPool();                                                                   ///< joins the workers
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const noexcept { return num_threads_; }

  /// fn(i) for every i in [0, size()), at the same time: fn(0) on the caller, fn(i) always on the i-th thread. Returns
  /// when all are done, and what they wrote is visible. Allocates nothing after the first call. `fn` must not throw:
  /// that terminates. Where the system refuses a thread, the caller does its share too.
  template <typename Fn>
  void run(const Fn& fn) noexcept {
    run_task({[](const void* context, int i) noexcept { (*static_cast<const Fn*>(context))(i); }, &fn});
  }

 private:
  struct Task {
    void (*call)(const void* context, int i) noexcept;  ///< null: the worker ends
    const void* context;
  };

  void run_task(Task task) noexcept;
  bool run_in_team(const Task& task) const noexcept;  ///< false where there is no OpenMP runtime
  void start() noexcept;
  void stop() noexcept;
  void work(int i, uint32_t seen) noexcept;

  // A run is one generation. task_ is written by the caller before generation_ moves and read by workers after; it is
  // written again only when pending_, which each worker lowers once per generation, is back at 0.
  const int num_threads_;
  const bool own_;
  Task task_{};
  std::atomic<uint32_t> generation_{0};
  std::atomic<int> pending_{0};
  std::unique_ptr<std::vector<std::thread>> workers_;
  pid_t process_ = 0;  ///< which process workers_ live in
};

}  // namespace shardow::base
