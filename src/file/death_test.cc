// A process that dies in a save, with all its ranks, leaves the old checkpoint or the new one.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <iterator>
#include <thread>

#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

/// Kills the process, with all its ranks, at its n-th call.
class Death : public base::Syscalls {
 public:
  explicit Death(int after, bool can_exchange = true) : left_(after), can_exchange_(can_exchange) {}
  int open(const char* path, int flags, mode_t mode) override { return (step(), Syscalls::open(path, flags, mode)); }
  int close(int fd) override { return (step(), Syscalls::close(fd)); }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    return (step(), Syscalls::pwrite(fd, data, bytes, offset));
  }
  int ftruncate(int fd, off_t length) override { return (step(), Syscalls::ftruncate(fd, length)); }
  int fsync(int fd) override { return (step(), Syscalls::fsync(fd)); }
  int rename(const char* from, const char* to) override { return (step(), Syscalls::rename(from, to)); }
  int rename_exchange(const char* a, const char* b) override {
    step();
    return can_exchange_ ? Syscalls::rename_exchange(a, b) : (errno = EINVAL, -1);
  }
  int mkdir(const char* path, mode_t mode) override { return (step(), Syscalls::mkdir(path, mode)); }
  int unlink(const char* path) override { return (step(), Syscalls::unlink(path)); }
  int rmdir(const char* path) override { return (step(), Syscalls::rmdir(path)); }

 private:
  void step() {
    if (left_-- == 0) ::raise(SIGKILL);
  }
  std::atomic<int> left_;
  bool can_exchange_;
};

/// Waits for the threads of calls that are timed, which end a moment after a save: what one of them holds when its
/// process forks, the lock of an allocator, say, the child never gets.
void wait_until_alone() {
  while (std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator()) > 1)
    std::this_thread::yield();
}

TEST_F(Checkpoints, IsTheOldOneOrTheNewOneWhereverItsProcessDied) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not follow threads started after fork()";
#endif
  for (const auto& [limit, can_exchange] :
       std::vector<std::pair<int64_t, bool>>{{0, true}, {1 << 20, true}, {1 << 20, false}}) {
    const auto path = folder_ / (limit == 0 ? "model.safetensors" : "model");
    version = 1;
    ASSERT_EQ(save_as(path, flat, 3, {.max_shard_size = limit}), all(3, kFine));
    int deaths = 0, seen_new = 0;
    for (bool died = true; died; ++deaths) {
      wait_until_alone();
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        ::alarm(60);
        Death death(deaths, can_exchange);
        machine_.syscalls = &death;
        version = 2;
        ::_exit(save_as(path, rows, 3, {.max_shard_size = limit}) == all(3, kFine) ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      died = WIFSIGNALED(status);
      ASSERT_EQ(died ? WTERMSIG(status) : WEXITSTATUS(status), died ? SIGKILL : 0);
      Held first(kSpecs[0].name, kSpecs[0].dtype, Region::whole(kSpecs[0].shape));
      load(*solo(), std::span(&first.view, 1), path, {.strict = false});
      version = first.memory[0] == (version = 1, value(kSpecs[0], 0)) ? 1 : 2;
      EXPECT_EQ(load_as(path, whole, 1), all(1, kFine)) << "killed at call " << deaths;
      seen_new += version == 2;
      version = 1;
      ASSERT_EQ(save_as(path, flat, 3, {.max_shard_size = limit}),
                all(3, kFine));  // clears away what the dead one left
      EXPECT_EQ(names().size(), limit == 0 ? 1u : 2u);
    }
    EXPECT_GT(deaths, 15);
    EXPECT_GT(seen_new, 1);
  }
  version = 0;
}

}  // namespace
}  // namespace shardow
