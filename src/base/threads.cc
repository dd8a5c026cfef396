// A run costs one futex wake for the workers and at most one for the caller: it does its own share meanwhile, then
// spins for about as long as a wake would take before it sleeps. Which process the workers live in is asked at every
// run, because a forked child inherits the object but no threads.
//
// Where the process has an OpenMP runtime (torch brings one), its threads do the work: after each of torch's own
// operations they spin for milliseconds, and threads of ours beside them got half of a processor (11.1 ms where 8.3 are
// possible, docs/performance.md). Not in a forked child, where that runtime's threads are gone and it does not know.
#include "base/threads.h"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>

#include "base/errors.h"

namespace shardow::base {
namespace {

constexpr int kMostByDefault = 4;
constexpr int kMost = 1024;
constexpr int kSpins = 2000;

int from_environment() noexcept {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (text == nullptr) return 0;
  const long number = std::strtol(text, nullptr, 10);
  return number < 1 ? 0 : static_cast<int>(std::min<long>(number, kMost));
}

int from_affinity() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());  // more than 1024 processors: the mask does not fit
}

/// The entry that compilers call for a parallel region, and who one is in it. Null where no runtime is in the process,
/// or no longer of use.
struct OpenMp {
  void (*parallel)(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);
  int (*thread_num)();
  int (*num_threads)();

  explicit operator bool() const noexcept {
    return parallel != nullptr && thread_num != nullptr && num_threads != nullptr;
  }
};

const pid_t loaded_in = getpid();

OpenMp open_mp() noexcept {
  if (getpid() != loaded_in) return {};
  const auto find = []<class Function>(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  };
  OpenMp found{};
  find("GOMP_parallel", found.parallel);
  find("omp_get_thread_num", found.thread_num);
  find("omp_get_num_threads", found.num_threads);
  return found;
}

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

int allowed_threads() noexcept {
  const int asked = from_environment();
  return asked > 0 ? asked : std::clamp(from_affinity(), 1, kMostByDefault);
}

ThreadPool::ThreadPool(int num_threads, Threads threads) : num_threads_(num_threads), own_(threads == Threads::kOwn) {
  if (num_threads < 1) fail(Code::kInvalidArgument, "a pool of {} threads; at least 1 is needed", num_threads);
}

ThreadPool::~ThreadPool() {
  stop();
}

/// The team may be smaller than asked for; its members then do several shares each.
bool ThreadPool::run_in_team(const Task& task) const noexcept {
  const OpenMp runtime = open_mp();
  if (!runtime) return false;
  struct Team {
    const Task& task;
    const OpenMp& runtime;
    int size;
  } team{task, runtime, num_threads_};
  runtime.parallel(
      [](void* data) {
        const Team& all = *static_cast<const Team*>(data);
        const int step = all.runtime.num_threads();
        for (int i = all.runtime.thread_num(); i < all.size; i += step) all.task.call(all.task.context, i);
      },
      &team, static_cast<unsigned>(num_threads_), 0);
  return true;
}

void ThreadPool::run_task(Task task) noexcept {
  if (num_threads_ > 1 && !own_ && run_in_team(task)) return;
  if (num_threads_ > 1 && process_ != getpid()) start();
  const int num_workers = workers_ ? static_cast<int>(workers_->size()) : 0;
  if (num_workers > 0) {
    task_ = task;
    pending_.store(num_workers, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  task.call(task.context, 0);
  for (int i = num_workers + 1; i < num_threads_; ++i) task.call(task.context, i);
  for (int spin = 0; spin < kSpins && pending_.load(std::memory_order_acquire) != 0; ++spin) pause();
  for (int left; (left = pending_.load(std::memory_order_acquire)) != 0;)
    pending_.wait(left, std::memory_order_acquire);
}

void ThreadPool::start() noexcept {
  // Workers of a parent process: their objects can be neither joined nor detached here, so they are left behind.
  static_cast<void>(workers_.release());
  pending_.store(0, std::memory_order_relaxed);
  process_ = getpid();
  try {
    workers_ = std::make_unique<std::vector<std::thread>>();
    workers_->reserve(static_cast<size_t>(num_threads_ - 1));
    const uint32_t seen = generation_.load(std::memory_order_relaxed);
    for (int i = 1; i < num_threads_; ++i) workers_->emplace_back([this, i, seen] { work(i, seen); });
  } catch (const std::exception&) {
    // No thread or no memory for it: those that did start go on, the caller does the rest.
  }
}

void ThreadPool::work(int i, uint32_t seen) noexcept {
  for (;;) {
    generation_.wait(seen, std::memory_order_acquire);
    ++seen;
    const Task task = task_;
    if (task.call == nullptr) return;
    task.call(task.context, i);
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
  }
}

void ThreadPool::stop() noexcept {
  if (!workers_) return;
  if (process_ != getpid()) {
    static_cast<void>(workers_.release());  // as in start()
    return;
  }
  task_ = {};
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : *workers_) worker.join();
}

}  // namespace shardow::base
