#include "base/timed_calls.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <future>
#include <thread>

#include "base/folder_fixture.h"

namespace shardow::base {
namespace {

using std::chrono::milliseconds;

/// A pipe that is full: who writes there waits until somebody reads.
class FullPipe {
 public:
  FullPipe() {
    EXPECT_EQ(::pipe(ends_.data()), 0);
    bytes_ = static_cast<size_t>(::fcntl(ends_[1], F_SETPIPE_SZ, 4096));
    const std::string much(bytes_, 'x');
    EXPECT_EQ(::write(ends_[1], much.data(), much.size()), static_cast<ssize_t>(much.size()));
  }
  ~FullPipe() { ::close(ends_[0]); }
  int end() const { return ends_[1]; }
  void empty() const {
    std::string much(bytes_, ' ');
    EXPECT_EQ(::read(ends_[0], much.data(), much.size()), static_cast<ssize_t>(much.size()));
  }

 private:
  std::array<int, 2> ends_{};
  size_t bytes_ = 0;
};

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) != -1;
}

/// Within ten seconds.
bool is_closed_soon(int fd) {
  for (int i = 0; i < 1000 && is_open(fd); ++i) std::this_thread::sleep_for(milliseconds(10));
  return !is_open(fd);
}

/// Of calls on descriptors none but a flush or a write of storage that stands still waits for long; closing waits for
/// nothing here, and a write at an offset is none of a pipe's, so that this one is a thread's that reads what it is
/// told late.
class Slow : public TimedCalls {
 public:
  using TimedCalls::TimedCalls;
  ssize_t write(int fd) {
    return on(fd, [fd] { return ::write(fd, "y", 1); });
  }
  ssize_t wait(int fd, const std::shared_future<void>& go) {
    return on(fd, [go]() -> ssize_t { return go.wait(), 0; });
  }
};

/// Opening a FIFO waits for the other side; so does everything that a test needs of a call that does not return.
class TimedCallsTest : public InFolder {
 protected:
  void SetUp() override { ASSERT_EQ(::mkfifo(fifo_.c_str(), 0600), 0); }

  const fs::path fifo_ = folder_ / "fifo";
};

TEST_F(TimedCallsTest, ReturnWhatTheCallsDo) {
  TimedCalls calls(milliseconds(10'000));
  const auto path = folder_ / "file";
  const int fd = calls.open(path.c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(calls.pwrite(fd, "abc", 3, 1), 3);
  EXPECT_EQ(calls.fsync(fd), 0);
  EXPECT_EQ(calls.ftruncate(fd, 2), 0);
  EXPECT_EQ(std::filesystem::file_size(path), 2u);
  EXPECT_EQ(calls.close(fd), 0);
  EXPECT_EQ(calls.close(fd), -1);
  EXPECT_EQ(errno, EBADF);
  struct statfs space {};
  EXPECT_EQ(calls.statfs(folder_.c_str(), &space), 0);
  EXPECT_GT(space.f_bsize, 0);
  EXPECT_EQ(calls.mkdir((folder_ / "new").c_str(), 0700), 0);
  EXPECT_EQ(calls.rmdir((folder_ / "new").c_str()), 0);
  EXPECT_EQ(calls.unlink(path.c_str()), 0);
  EXPECT_EQ(calls.unlink(path.c_str()), -1);
  EXPECT_EQ(errno, ENOENT);
}

TEST_F(TimedCallsTest, LeaveOneThatDoesNotReturnAndWhatItOpensLateIsClosed) {
  TimedCalls calls(milliseconds(1000));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(calls.open(fifo_.c_str(), O_WRONLY, 0), -1);
  EXPECT_EQ(errno, ETIMEDOUT);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(1000));
  const int other = ::open(fifo_.c_str(), O_RDONLY);  // the one that was left returns
  ASSERT_GE(other, 0);
  char byte = 0;
  EXPECT_EQ(::read(other, &byte, 1), 0);  // whoever had it open for writing has closed it
  ::close(other);
}

TEST_F(TimedCallsTest, ThatWereLeftMayChangeTheirNamesUntilTheyReturn) {
  TimedCalls calls(milliseconds(1000));
  EXPECT_EQ(calls.open(fifo_.c_str(), O_WRONLY | O_CREAT, 0600), -1);
  EXPECT_TRUE(calls.left_one());
  EXPECT_TRUE(may_still_change(fifo_));
  EXPECT_TRUE(may_still_change(folder_));
  EXPECT_FALSE(may_still_change(folder_.parent_path()));
  const int other = ::open(fifo_.c_str(), O_RDONLY);
  for (int i = 0; i < 1000 && may_still_change(fifo_); ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_FALSE(may_still_change(fifo_));
  ::close(other);
  TimedCalls next(milliseconds(10'000));
  EXPECT_EQ(next.mkdir((folder_ / "new").c_str(), 0700), 0);
  EXPECT_FALSE(may_still_change(folder_ / "new"));  // it was waited for
}

TEST_F(TimedCallsTest, ReadAndListAndRename) {
  TimedCalls calls(milliseconds(10'000));
  const auto path = folder_ / "file", other = folder_ / "other";
  std::ofstream(path) << std::string(3 << 20, 'x') << "end";
  const int fd = calls.open(path.c_str(), O_RDONLY, 0);
  std::string text(10, ' ');
  EXPECT_EQ(calls.pread(fd, text.data(), 10, (3 << 20) - 1), 4);
  EXPECT_EQ(text.substr(0, 4), "xend");
  EXPECT_EQ(calls.close(fd), 0);
  EXPECT_EQ(calls.rename(path.c_str(), other.c_str()), 0);
  EXPECT_EQ(calls.rename(path.c_str(), other.c_str()), -1);
  EXPECT_EQ(errno, ENOENT);
  std::vector<std::string> names;
  EXPECT_EQ(calls.list(folder_.c_str(), &names), 0);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"fifo", "other"}));
  EXPECT_EQ(calls.list(path.c_str(), &names), -1);
  EXPECT_EQ(errno, ENOENT);
}

TEST_F(TimedCallsTest, AreNotMadeAnyMoreAfterOneThatDidNotReturn) {
  TimedCalls calls(milliseconds(1000));
  EXPECT_EQ(calls.open(fifo_.c_str(), O_WRONLY, 0), -1);
  const auto path = folder_ / "refused";
  EXPECT_EQ(calls.mkdir(path.c_str(), 0700), -1);
  EXPECT_EQ(errno, ETIMEDOUT);
  EXPECT_FALSE(std::filesystem::exists(path));
  ::close(::open(fifo_.c_str(), O_RDONLY | O_NONBLOCK));
}

TEST_F(TimedCallsTest, LeaveADescriptorToTheCallThatHasIt) {
  const FullPipe pipe;
  Slow calls(milliseconds(1000));
  EXPECT_EQ(calls.write(pipe.end()), -1);
  EXPECT_EQ(errno, ETIMEDOUT);
  EXPECT_EQ(calls.close(pipe.end()), -1);
  EXPECT_TRUE(is_open(pipe.end()));
  pipe.empty();
  EXPECT_TRUE(is_closed_soon(pipe.end()));
}

TEST_F(TimedCallsTest, CloseADescriptorWhenTheLastOfThoseThatHaveItReturns) {
  const int fd = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY);
  Slow calls(milliseconds(1000));
  std::array<std::promise<void>, 2> go;
  std::array<std::thread, 2> threads;
  for (size_t i = 0; i < 2; ++i) {
    threads[i] = std::thread([&, i] { EXPECT_EQ(calls.wait(fd, go[i].get_future().share()), -1); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(calls.close(fd), -1);
  go[1].set_value();
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_TRUE(is_open(fd));  // the other call may use it
  go[0].set_value();
  EXPECT_TRUE(is_closed_soon(fd));
}

TEST_F(TimedCallsTest, RefuseADescriptorThatACallHasAndCloseOthersWhereNothingElseIsMadeAnyMore) {
  const FullPipe pipe;
  Slow calls(milliseconds(400));
  const int other = calls.open((folder_ / "other").c_str(), O_WRONLY | O_CREAT, 0600);
  ASSERT_EQ(calls.flock(other, LOCK_EX | LOCK_NB), 0);
  EXPECT_EQ(calls.write(pipe.end()), -1);
  EXPECT_EQ(calls.pwrite(pipe.end(), "z", 1, 0), -1);
  EXPECT_EQ(errno, ETIMEDOUT);  // and not ESPIPE: it was not made
  EXPECT_EQ(calls.flock(other, LOCK_UN), -1);
  EXPECT_EQ(calls.close(other), -1);
  EXPECT_EQ(errno, ETIMEDOUT);
  EXPECT_TRUE(is_closed_soon(other));
  pipe.empty();
  EXPECT_TRUE(is_closed_soon(pipe.end()));
}

TEST_F(TimedCallsTest, ServeSeveralThreads) {
  TimedCalls calls(milliseconds(10'000));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < 50; ++k) {
        const auto path = folder_ / std::to_string(100 * i + k);
        const int fd = calls.open(path.c_str(), O_WRONLY | O_CREAT, 0600);
        EXPECT_EQ(calls.pwrite(fd, &k, sizeof k, 0), static_cast<ssize_t>(sizeof k));
        EXPECT_EQ(calls.close(fd), 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 201);
}

}  // namespace
}  // namespace shardow::base
