// A process that dies in a save, with all its ranks, leaves the old checkpoint or the new one.
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <iterator>
#include <thread>

#include "file/disk_model.h"
#include "file/saving_fixture.h"

namespace shardow {
namespace {

/// Kills the process, with all its ranks, at its n-th call.
class Death : public base::Syscalls {
 public:
  explicit Death(int after) : left_(after) {}
  int open(const char* path, int flags, mode_t mode) override { return (step(), Syscalls::open(path, flags, mode)); }
  int close(int fd) override { return (step(), Syscalls::close(fd)); }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    return (step(), Syscalls::pwrite(fd, data, bytes, offset));
  }
  int ftruncate(int fd, off_t length) override { return (step(), Syscalls::ftruncate(fd, length)); }
  int fsync(int fd) override { return (step(), Syscalls::fsync(fd)); }
  int rename(const char* from, const char* to) override { return (step(), Syscalls::rename(from, to)); }
  int link(const char* from, const char* to) override { return (step(), Syscalls::link(from, to)); }
  int mkdir(const char* path, mode_t mode) override { return (step(), Syscalls::mkdir(path, mode)); }
  int unlink(const char* path) override { return (step(), Syscalls::unlink(path)); }
  int rmdir(const char* path) override { return (step(), Syscalls::rmdir(path)); }

 private:
  void step() {
    if (left_-- == 0) ::raise(SIGKILL);
  }
  std::atomic<int> left_;
};

/// Waits for the threads of calls that are timed, which end a moment after a save: what one of them holds when its
/// process forks, the lock of an allocator, say, the child never gets.
void wait_until_alone() {
  while (std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator()) > 1)
    std::this_thread::yield();
}

/// How a save is made: as one file, as a directory of one or several, or as files with names of their own.
struct Form {
  const char* name;
  int64_t limit;
  bool named = false;
};

class Dying : public Saving {
 protected:
  Dying() { move_to_memory(); }

  std::vector<int> save_form(const Form& form, const Sharding& sharding) {
    if (form.named) return save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"});
    return save_as(folder_ / form.name, sharding, 3, {.max_shard_size = form.limit});
  }

  /// Which version is there, whole.
  int found(const Form& form) {
    const auto path = folder_ / form.name / (form.named ? "ema-0.99.safetensors" : "");
    const auto at = form.named || form.name == std::string("model") ? path : folder_ / form.name;
    for (const int which : {1, 2}) {
      version = which;
      auto read = hold(whole, 0, 1, false), expected = hold(whole, 0, 1, true);
      load(*solo(), views_of(read), at);
      const auto same = [](const Held& a, const Held& b) { return a.memory == b.memory; };
      if (std::equal(read.begin(), read.end(), expected.begin(), same)) return which;
    }
    return -1;
  }

  /// A save of version 2 where one of version 1 is dies at each of its calls in turn; then version 1 is saved again.
  void die_everywhere(const Form& before, const Form& form) {
    const auto path = folder_ / before.name;
    const bool directory = path.extension().empty();
    for (const std::string& name : names()) fs::remove_all(folder_ / name);
    if (directory) fs::create_directories(path / "logs");
    std::set<std::string> others;
    if (directory) {
      write(path / "config.json", "mine");
      write(folder_ / "original", "another user's");
      fs::create_hard_link(folder_ / "original", path / "linked");
      others = {"config.json", "linked", "logs"};
    }
    version = 1;
    ASSERT_EQ(save_form(before, flat), all(before.named ? 2 : 3, kFine));
    int deaths = 0, seen_new = 0;
    for (bool died = true; died; ++deaths) {
      wait_until_alone();
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        ::alarm(60);
        Death death(deaths);
        machine_ = &death;
        version = 2;
        ::_exit(save_form(form, rows) == all(form.named ? 2 : 3, kFine) ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      died = WIFSIGNALED(status);
      ASSERT_EQ(died ? WTERMSIG(status) : WEXITSTATUS(status), died ? SIGKILL : 0);
      const int which = found(form);
      EXPECT_TRUE(which == 1 || which == 2) << "killed at call " << deaths;
      seen_new += which == 2;
      version = 1;
      ASSERT_EQ(save_form(before, flat), all(before.named ? 2 : 3, kFine));  // clears away what the dead one left
      EXPECT_EQ(names(), (directory ? std::set<std::string>{"model", "original"} : std::set<std::string>{before.name}));
      if (!directory) continue;
      EXPECT_EQ(versions::strays(path, others), "") << "killed at call " << deaths;
      EXPECT_TRUE(fs::equivalent(folder_ / "original", path / "linked"));
      EXPECT_EQ(bytes_of(path / "config.json"), "mine");
    }
    EXPECT_GT(deaths, 15);
    EXPECT_GT(seen_new, 1);
    version = 0;
  }
};

TEST_F(Dying, IsTheOldOneOrTheNewOneAndTheNextSaveClearsAwayExactlyItsOwn) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not follow threads started after fork()";
#endif
  const Form file{"model.safetensors", 0}, one{"model", 0}, several{"model", 1 << 20}, named{"model", 0, true};
  std::vector<std::pair<Form, Form>> changes{{file, file}, {one, several}, {several, one}, {named, named}};
  if (kAll) changes.insert(changes.end(), {{one, one}, {several, several}});
  for (const auto& [before, form] : changes) {
    SCOPED_TRACE(fmt::format("{} {} {} to {} {}", before.name, before.limit, before.named, form.name, form.limit));
    die_everywhere(before, form);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace shardow
