#include "base/threads.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <numeric>
#include <set>
#include <string>
#include <thread>

#include "base/allocations_fixture.h"
#include "base/errors.h"

namespace shardow::base {
namespace {

using Tasks = std::set<std::string>;

Tasks tasks_of_process() {
  Tasks tasks;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) tasks.insert(task.path().filename());
  return tasks;
}

/// Threads of an earlier test may still be listed in `before`, and be gone now: joined is not yet cleared away.
size_t num_threads_since(const Tasks& before) {
  const Tasks now = tasks_of_process();
  return static_cast<size_t>(
      std::ranges::count_if(now, [&](const std::string& task) { return !before.contains(task); }));
}

size_t num_threads_left_since(const Tasks& before) {
  for (int i = 0; i < 500 && num_threads_since(before) > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return num_threads_since(before);
}

class Environment {
 public:
  explicit Environment(const char* value) {
    if (const char* old = std::getenv(kName)) old_ = old;
    value == nullptr ? unsetenv(kName) : setenv(kName, value, 1);
  }
  ~Environment() { old_.empty() ? unsetenv(kName) : setenv(kName, old_.c_str(), 1); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static constexpr const char* kName = "OMP_NUM_THREADS";
  std::string old_;
};

TEST(AllowedThreads, TheEnvironmentDecides) {
  struct Case {
    const char* value;
    int threads;
  };
  for (const Case c : {Case{"1", 1}, Case{"3", 3}, Case{"16", 16}, Case{"6,2", 6}, Case{"9999999", 1024}}) {
    const Environment environment(c.value);
    EXPECT_EQ(allowed_threads(), c.threads) << c.value;
  }
}

TEST(AllowedThreads, WithoutAUsableValueTheAffinityMaskDecides) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  int processor = 0;
  while (!CPU_ISSET(processor, &before)) ++processor;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  for (const char* value : {static_cast<const char*>(nullptr), "", "0", "-2", "many"}) {
    const Environment environment(value);
    EXPECT_EQ(allowed_threads(), std::min(CPU_COUNT(&before), 4));
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(allowed_threads(), 1);
    ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  }
}

TEST(ThreadPool, RunsEveryIndexOncePerRun) {
  for (int n = 1; n <= 8; ++n) {
    ThreadPool pool(n);
    std::vector<int> calls(static_cast<size_t>(n));
    for (int run = 1; run <= 50; ++run) {
      pool.run([&](int i) { ++calls[static_cast<size_t>(i)]; });
      EXPECT_EQ(calls, std::vector<int>(static_cast<size_t>(n), run));
    }
  }
}

TEST(ThreadPool, EachIndexKeepsItsThreadAndZeroIsTheCaller) {
  ThreadPool pool(4);
  std::array<std::thread::id, 4> first, now;
  pool.run([&](int i) { first[static_cast<size_t>(i)] = std::this_thread::get_id(); });
  EXPECT_EQ(first[0], std::this_thread::get_id());
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 4u);
  for (int run = 0; run < 20; ++run) {
    pool.run([&](int i) { now[static_cast<size_t>(i)] = std::this_thread::get_id(); });
    EXPECT_EQ(now, first);
  }
}

TEST(ThreadPool, EveryShareRunsAtTheSameTime) {
  ThreadPool pool(4);
  std::atomic<int> inside{0};
  pool.run([&](int) {
    inside.fetch_add(1);
    inside.notify_all();
    for (int seen; (seen = inside.load()) < 4;) inside.wait(seen);
  });
  EXPECT_EQ(inside.load(), 4);
}

TEST(ThreadPool, AllocatesNothingAfterTheFirstRun) {
  ThreadPool pool(3);
  std::array<long, 3> sums{};
  const auto share = [&](int i) { sums[static_cast<size_t>(i)] += i; };
  pool.run(share);
  EXPECT_EQ(allocations_of([&] { pool.run(share); }), 0);
  EXPECT_GT(allocations_of([] { delete new ThreadPool(1); }), 0) << "the counter counts";
}

TEST(ThreadPool, StartsNoThreadBeforeTheFirstRunAndLeavesNone) {
  const Tasks before = tasks_of_process();
  {
    ThreadPool pool(4);
    EXPECT_EQ(num_threads_since(before), 0);
    pool.run([](int) {});
    EXPECT_EQ(num_threads_since(before), 3);
  }
  EXPECT_EQ(num_threads_left_since(before), 0);
}

TEST(ThreadPool, OfOneNeedsNoThread) {
  const Tasks before = tasks_of_process();
  ThreadPool pool(1);
  pool.run([&](int i) { EXPECT_EQ(i, 0); });
  EXPECT_EQ(num_threads_since(before), 0);
}

TEST(ThreadPool, RefusesToBeEmpty) {
  EXPECT_THROW(ThreadPool(0), Error);
}

/// In a forked child: 0 if the inherited pool runs every share and is destroyed without waiting for its parent's
/// threads.
int use_in_child(ThreadPool* pool) {
  std::array<int, 3> calls{};
  for (int run = 0; run < 3; ++run) pool->run([&](int i) { ++calls[static_cast<size_t>(i)]; });
  delete pool;
  return calls == std::array<int, 3>{3, 3, 3} ? 0 : 1;
}

int status_of_child(pid_t child) {
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(ThreadPool, AForkedChildStartsItsOwnThreads) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow threads started after fork()";
#endif
  auto pool = std::make_unique<ThreadPool>(3);
  pool->run([](int) {});
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that waits for threads of its parent would wait for ever
    _exit(use_in_child(pool.release()));
  }
  EXPECT_EQ(status_of_child(child), 0);
  std::array<int, 3> calls{};
  pool->run([&](int i) { ++calls[static_cast<size_t>(i)]; });
  EXPECT_EQ(std::accumulate(calls.begin(), calls.end(), 0), 3) << "the parent's pool goes on";
}

TEST(ThreadPool, AForkedChildThatOnlyDestroysItDoesNotWait) {
  auto pool = std::make_unique<ThreadPool>(3);
  pool->run([](int) {});
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    pool.reset();
    _exit(0);
  }
  EXPECT_EQ(status_of_child(child), 0);
}

}  // namespace
}  // namespace shardow::base
