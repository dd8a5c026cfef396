// Disks that fail and machines that lack something: nothing is published where anything failed, and every rank gets the
// same error.
#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "base/errors.h"
#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

/// A disk that fails at its n-th call of one kind, or always does half of what it is asked.
class BadDisk : public base::Syscalls {
 public:
  enum class Call { kOpen, kWrite, kRead, kTruncate, kSync, kRename, kMkdir, kSpace, kClose };
  BadDisk(Call call, int after, int error) : call_(call), after_(after), error_(error) {}

  int open(const char* path, int flags, mode_t mode) override {
    return fails(Call::kOpen) ? -1 : Syscalls::open(path, flags, mode);
  }
  int close(int fd) override {
    const int result = Syscalls::close(fd);
    return fails(Call::kClose) ? -1 : result;
  }
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    return fails(Call::kRead) ? -1 : Syscalls::pread(fd, data, some(bytes), offset);
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    return fails(Call::kWrite) ? -1 : Syscalls::pwrite(fd, data, some(bytes), offset);
  }
  int ftruncate(int fd, off_t length) override { return fails(Call::kTruncate) ? -1 : Syscalls::ftruncate(fd, length); }
  int fsync(int fd) override { return fails(Call::kSync) ? -1 : Syscalls::fsync(fd); }
  int rename(const char* from, const char* to) override {
    return fails(Call::kRename) ? -1 : Syscalls::rename(from, to);
  }
  int mkdir(const char* path, mode_t mode) override { return fails(Call::kMkdir) ? -1 : Syscalls::mkdir(path, mode); }
  int statfs(const char* path, struct statfs* out) override {
    return fails(Call::kSpace) ? -1 : Syscalls::statfs(path, out);
  }

  bool failed() const { return failed_; }

 private:
  bool fails(Call call) {
    const std::lock_guard lock(mutex_);
    if (call != call_ || error_ == 0 || after_-- != 0) return false;
    failed_ = true;
    errno = error_;
    return true;
  }
  size_t some(size_t bytes) const { return error_ == 0 && bytes > 1 ? bytes / 2 : bytes; }

  std::mutex mutex_;
  Call call_;
  int after_, error_;
  bool failed_ = false;
};

TEST_F(Checkpoints, OfABadDiskIsTheOldOneWithOneErrorForAll) {
  using Call = BadDisk::Call;
  const auto path = folder_ / "model";
  const SaveOptions options{.max_shard_size = 1 << 20, .texts = {{"checkpoint.json", "{}"}}};
  ASSERT_EQ(save_as(path, flat, 3, options), all(3, kFine));
  std::vector<int> errors{EIO};
  if (!kSlow) errors.push_back(ENOSPC);
  if (kAll) errors.push_back(EDQUOT);
  for (const Call call : {Call::kOpen, Call::kWrite, Call::kTruncate, Call::kSync, Call::kRename, Call::kMkdir,
                          Call::kSpace, Call::kClose}) {
    for (const int error : errors) {
      for (int after = 0;; ++after) {
        SCOPED_TRACE(std::to_string(static_cast<int>(call)) + " fails with " + std::to_string(error) + " after " +
                     std::to_string(after));
        BadDisk disk(call, after, error);
        machine_ = &disk;
        const std::vector<int> codes = save_as(path, rows, 3, options);
        machine_ = nullptr;
        if (!disk.failed()) break;  // every such call has failed once
        const std::set<int> different(codes.begin(), codes.end());
        EXPECT_EQ(different.size(), 1u);
        const int expected = static_cast<int>(error == EIO ? Code::kIo : Code::kOutOfSpace);
        EXPECT_TRUE(*different.begin() == expected ||
                    *different.begin() == kFine);  // closing a file that was only read may fail unheard
        EXPECT_EQ(names(), (std::set<std::string>{"model"}));
        EXPECT_EQ(load_as(path, whole, 1), all(1, kFine));
      }
    }
  }
}

/// Whether the checkpoint is of version `which`, to the last byte.
bool is_there(int which, const fs::path& path) {
  version = which;
  auto read = hold(whole, 0, 1, false), expected = hold(whole, 0, 1, true);
  load(*solo(), views_of(read), path);
  return std::equal(read.begin(), read.end(), expected.begin(),
                    [](const Held& a, const Held& b) { return a.memory == b.memory; });
}

/// One rank's disk fails at its n-th call; the others' are well.
TEST_F(Checkpoints, OfOneRankWhoseDiskFailsIsTheOldOneWithOneErrorForAll) {
  using Call = BadDisk::Call;
  const auto path = folder_ / "model";
  ASSERT_EQ(save_as(path, flat, 3, {.max_shard_size = 1 << 20}), all(3, kFine));
  version = 5;
  for (const int bad : {0, 1, 2}) {
    std::set<Call> failed;
    for (const Call call : {Call::kOpen, Call::kWrite, Call::kSync, Call::kClose}) {
      for (const int error : {EIO, ENOSPC}) {
        for (int after = 0;; ++after) {
          SCOPED_TRACE(
              fmt::format("rank {}: call {} fails with {} after {}", bad, static_cast<int>(call), error, after));
          BadDisk disk(call, after, error);
          base::Syscalls* const machine = &disk;
          std::atomic<int> right{0};
          const std::vector<int> codes = on_ranks(3, [&](Group& group) {
            auto held = hold(rows, group.rank(), 3, true);
            const base::CallsTo here(group.rank() == bad ? machine : nullptr);
            try {
              save(group, views_of(held), path, {.max_shard_size = 1 << 20});
            } catch (const Error& one) {
              const bool named =
                  group.rank() == bad || std::string(one.what()).starts_with(fmt::format("rank {} of 3 failed: ", bad));
              right += named && one.os_errno() == error;
              throw;
            }
          });
          if (codes == all(3, kFine)) {  // what was only looked for, or read, may fail unheard
            EXPECT_EQ(load_as(path, whole, 1), all(1, kFine));
            version = 0;
            ASSERT_EQ(save_as(path, flat, 3, {.max_shard_size = 1 << 20}), all(3, kFine));
            version = 5;
            if (disk.failed()) continue;
            break;  // every such call has failed once
          }
          failed.insert(call);
          EXPECT_EQ(codes, all(3, static_cast<int>(error == EIO ? Code::kIo : Code::kOutOfSpace)));
          EXPECT_EQ(right, 3) << "errno, and the rank's name elsewhere";
          EXPECT_EQ(names(), (std::set<std::string>{"model"}));
          if (bad == 0 && is_there(5, path)) {  // in the last flush, after the commit
            version = 0;
            ASSERT_EQ(save_as(path, flat, 3, {.max_shard_size = 1 << 20}), all(3, kFine));
          }
          EXPECT_TRUE(is_there(0, path));
          version = 5;
        }
      }
    }
    EXPECT_EQ(failed, (std::set<Call>{Call::kOpen, Call::kWrite, Call::kSync, Call::kClose})) << "rank " << bad;
  }
  version = 0;
  EXPECT_EQ(load_as(path, whole, 1), all(1, kFine));
}

/// A machine that does what its name says.
class Interrupted : public base::Syscalls {
 public:
  int open(const char* p, int flags, mode_t mode) override { return now() ? -1 : Syscalls::open(p, flags, mode); }
  ssize_t pread(int fd, void* data, size_t bytes, off_t at) override {
    return now() ? -1 : Syscalls::pread(fd, data, bytes, at);
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) override {
    return now() ? -1 : Syscalls::pwrite(fd, data, bytes, at);
  }
  int ftruncate(int fd, off_t length) override { return now() ? -1 : Syscalls::ftruncate(fd, length); }
  int fsync(int fd) override { return now() ? -1 : Syscalls::fsync(fd); }

 private:
  bool now() {
    errno = EINTR;
    return calls_++ % 2 == 0;
  }
  std::atomic<int> calls_{0};
};
class ReadOnly : public base::Syscalls {
 public:
  int open(const char* p, int flags, mode_t mode) override {
    return flags & O_CREAT ? (errno = EROFS, -1) : Syscalls::open(p, flags, mode);
  }
  int mkdir(const char*, mode_t) override { return (errno = EROFS, -1); }
};
class Shrinking : public base::Syscalls {
 public:
  explicit Shrinking(fs::path path) : path_(std::move(path)) {}
  ssize_t pread(int fd, void* data, size_t bytes, off_t at) override {
    if (reads_++ == 4) fs::resize_file(path_, 5000);
    return Syscalls::pread(fd, data, bytes, at);
  }

 private:
  fs::path path_;
  std::atomic<int> reads_{0};
};

TEST_F(Checkpoints, GoesOnAfterInterruptions) {
  Interrupted machine;
  machine_ = &machine;
  EXPECT_EQ(save_as(folder_ / "a.safetensors", columns, 3), all(3, kFine));
  EXPECT_EQ(load_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
}

TEST_F(Checkpoints, OfAReadOnlyDirectoryIsOneErrorForAll) {
  ReadOnly machine;
  machine_ = &machine;
  EXPECT_EQ(save_as(folder_ / "a.safetensors", rows, 3), all(3, static_cast<int>(Code::kIo)));
  EXPECT_EQ(save_as(folder_ / "a", rows, 3), all(3, static_cast<int>(Code::kIo)));
  EXPECT_TRUE(names().empty());
}

TEST_F(Checkpoints, OfAFileThatShrinksWhileItIsReadIsOneErrorForAll) {
  ASSERT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  Shrinking machine(folder_ / "a.safetensors");
  machine_ = &machine;
  EXPECT_EQ(load_as(folder_ / "a.safetensors", columns, 2, false), all(2, static_cast<int>(Code::kCorrupt)));
}

TEST_F(Checkpoints, OfADiskThatDoesHalfOfWhatItIsAskedIsWhole) {
  BadDisk disk(BadDisk::Call::kOpen, 0, 0);
  machine_ = &disk;
  EXPECT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  EXPECT_EQ(load_as(folder_ / "a.safetensors", flat, 3), all(3, kFine));
}

TEST_F(Checkpoints, ThatCannotBeReadIsOneErrorForAll) {
  ASSERT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  for (int after = 0;; ++after) {
    BadDisk disk(BadDisk::Call::kRead, after, EIO);
    machine_ = &disk;
    const std::vector<int> codes = load_as(folder_ / "a.safetensors", rows, 2, false);
    machine_ = nullptr;
    if (!disk.failed()) break;
    EXPECT_EQ(codes, all(2, static_cast<int>(Code::kIo)));
  }
  EXPECT_EQ(load_as(folder_ / "nothing.safetensors", rows, 2, false), all(2, static_cast<int>(Code::kNotFound)));
}

}  // namespace
}  // namespace shardow
