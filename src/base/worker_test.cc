#include "base/worker.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <latch>
#include <stdexcept>

namespace shardow::base {
namespace {

int64_t num_threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
}

TEST(Worker, DoesOnePieceAfterTheOther) {
  Worker worker;
  int done = 0;
  for (int i = 0; i < 1000; ++i) {
    worker.begin([&] { ++done; });
    worker.wait();
    ASSERT_EQ(done, i + 1);
    ASSERT_FALSE(worker.busy());
  }
}

TEST(Worker, GoesOnWhileItsOwnerDoesSomethingElse) {
  Worker worker;
  std::latch held(1);
  bool done = false;
  worker.begin([&] {
    held.wait();
    done = true;
  });
  EXPECT_TRUE(worker.busy());
  held.count_down();
  worker.wait();
  EXPECT_TRUE(done);
}

TEST(Worker, TellsWhatItsPieceThrewOnce) {
  Worker worker;
  worker.begin([] { throw std::runtime_error("of the piece"); });
  EXPECT_THROW(worker.wait(), std::runtime_error);
  worker.wait();
  worker.begin([] {});
  worker.wait();
}

TEST(Worker, EndsItsPieceBeforeItIsDestroyed) {
  int done = 0;
  for (int i = 0; i < 100; ++i) {
    Worker worker;
    worker.begin([&] { ++done; });
  }
  EXPECT_EQ(done, 100);
}

TEST(Worker, HasOneThread) {
  Worker worker;
  worker.begin([] {});
  worker.wait();
  const int64_t before = num_threads();
  for (int i = 0; i < 1000; ++i) worker.begin([] {});
  worker.wait();
  EXPECT_EQ(num_threads(), before);
}

/// What a child found: its exit status.
template <typename Fn>
int in_child(const Fn& fn) {
  const pid_t child = fork();
  if (child == 0) _exit(fn());
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Worker, IsWaitedForByAForkWhoseChildGoesOn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow threads started after fork()";
#endif
  Worker worker;
  std::latch held(1);
  int done = 0;
  worker.begin([&] {
    held.wait();
    ++done;
  });
  std::thread opens([&] { held.count_down(); });
  EXPECT_EQ(in_child([&] {
              const int before = done;
              worker.begin([&] { ++done; });
              worker.wait();
              return before * 10 + done;
            }),
            12);
  opens.join();
  worker.begin([&] { ++done; });
  worker.wait();
  EXPECT_EQ(done, 2);
}

}  // namespace
}  // namespace shardow::base
