// Disks that fail, machines that lack something, processes and ranks that die: nothing is published where anything failed, and every rank
// gets the same error.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>

#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

/// A disk that fails at its n-th call of one kind, or always does half of what it is asked.
class BadDisk : public base::Syscalls {
 public:
  enum class Call { kOpen, kWrite, kRead, kTruncate, kSync, kRename, kMkdir, kSpace, kClose };
  BadDisk(Call call, int after, int error) : call_(call), after_(after), error_(error) {}

  int open(const char* path, int flags, mode_t mode) override { return fails(Call::kOpen) ? -1 : Syscalls::open(path, flags, mode); }
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
  int rename(const char* from, const char* to) override { return fails(Call::kRename) ? -1 : Syscalls::rename(from, to); }
  int exchange(const char* a, const char* b) override { return fails(Call::kRename) ? -1 : Syscalls::exchange(a, b); }
  int mkdir(const char* path, mode_t mode) override { return fails(Call::kMkdir) ? -1 : Syscalls::mkdir(path, mode); }
  int statfs(const char* path, struct statfs* out) override { return fails(Call::kSpace) ? -1 : Syscalls::statfs(path, out); }

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

TEST_F(Checkpoint, OfABadDiskIsTheOldOneWithOneErrorForAll) {
  using Call = BadDisk::Call;
  const auto path = folder_ / "model";
  const SaveOptions options{.max_shard_size = 1 << 20};
  ASSERT_EQ(save_as(path, flat, 3, options), all(3, kFine));
  const std::string before = bytes_of(path / "model-00001-of-00003.safetensors");
  ASSERT_FALSE(before.empty());
  for (const Call call :
       {Call::kOpen, Call::kWrite, Call::kTruncate, Call::kSync, Call::kRename, Call::kMkdir, Call::kSpace, Call::kClose}) {
    for (const int error : kSlow ? std::vector<int>{EIO} : std::vector<int>{EIO, ENOSPC, EDQUOT}) {
      for (int after = 0;; ++after) {
        SCOPED_TRACE(std::to_string(static_cast<int>(call)) + " fails with " + std::to_string(error) + " after " + std::to_string(after));
        BadDisk disk(call, after, error);
        base::replace_syscalls(&disk);
        const std::vector<int> codes = save_as(path, rows, 3, options);
        base::replace_syscalls(nullptr);
        if (!disk.failed()) break;  // every such call has failed once
        const std::set<int> different(codes.begin(), codes.end());
        EXPECT_EQ(different.size(), 1u);
        const int expected = static_cast<int>(error == EIO ? Code::kIo : Code::kOutOfSpace);
        EXPECT_TRUE(*different.begin() == expected || *different.begin() == kFine);  // closing a file that was only read may fail unheard
        EXPECT_EQ(names(), (std::set<std::string>{"model"}));
        EXPECT_EQ(load_as(path, whole, 1), all(1, kFine));
        EXPECT_TRUE(bytes_of(path / "model-00001-of-00003.safetensors") == before);
      }
    }
  }
}

/// What a mount of an object store does: files are written from front to end and appear when they are closed, if all their writes went
/// well; where `renames` is false nothing is renamed.
class ObjectStore : public base::Syscalls {
 public:
  explicit ObjectStore(bool renames, int fail_after = -1) : renames_(renames), left_(fail_after) {}

  int open(const char* path, int flags, mode_t mode) override {
    if ((flags & O_CREAT) == 0) return Syscalls::open(path, flags, mode);
    if (const int error = fs::exists(path) ? EEXIST : 0; error != 0 && (flags & O_EXCL) != 0) return refuse(error);
    const std::string part = testing::TempDir() + "part" + std::to_string(parts_++);
    const int fd = Syscalls::open(part.c_str(), flags, mode);
    const std::lock_guard lock(mutex_);
    if (fd >= 0) open_[fd] = {path, part};
    return fd;
  }
  int close(int fd) override {
    const std::lock_guard lock(mutex_);
    if (const auto found = open_.find(fd); found != open_.end()) {
      found->second.failed ? fs::remove(found->second.part) : (fs::rename(found->second.part, found->second.path), true);
      open_.erase(found);
    }
    return Syscalls::close(fd);
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    {
      const std::lock_guard lock(mutex_);
      Upload& upload = open_.at(fd);
      const int error = upload.written != offset ? EINVAL : left_-- == 0 ? EIO : 0;
      upload.failed = upload.failed || error != 0;
      if (error != 0) return refuse(error);
      upload.written += static_cast<off_t>(bytes);
    }
    return Syscalls::pwrite(fd, data, bytes, offset);
  }
  int ftruncate(int, off_t) override { return refuse(EOPNOTSUPP); }
  int rename(const char* from, const char* to) override { return renames_ ? Syscalls::rename(from, to) : refuse(ENOSYS); }
  int exchange(const char*, const char*) override { return refuse(ENOSYS); }

  bool failed() const { return left_ < 0; }

 private:
  struct Upload {
    fs::path path, part;
    off_t written = 0;
    bool failed = false;
  };
  static int refuse(int error) {
    errno = error;
    return -1;
  }
  bool renames_;
  std::mutex mutex_;
  std::map<int, Upload> open_;
  int left_;
  std::atomic<int> parts_{0};
};

TEST_F(Checkpoint, GoesToStorageThatTakesFilesOnlyFromFrontToEnd) {
  ASSERT_EQ(save_as(folder_ / "reference.safetensors", whole, 1), all(1, kFine));
  const std::string reference = bytes_of(folder_ / "reference.safetensors");
  for (const bool renames : {true, false}) {
    for (const auto& [name, sharding] : kShardings) {
      if (kSlow && std::string(name) != "columns") continue;
      SCOPED_TRACE(std::string(name) + (renames ? ", renaming" : ", not renaming"));
      ObjectStore store(renames);
      base::replace_syscalls(&store);
      for (int round = 0; round < 2; ++round) {
        EXPECT_EQ(save_as(folder_ / "one.safetensors", sharding, 3), all(3, kFine));
        EXPECT_EQ(save_as(folder_ / "model", sharding, 3, {.max_shard_size = 1 << 20}), all(3, kFine));
        EXPECT_TRUE(bytes_of(folder_ / "one.safetensors") == reference);
        EXPECT_EQ(load_as(folder_ / "model", whole, 1), all(1, kFine));
        EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "model"), {}), 4);  // three files and the index
      }
      base::replace_syscalls(nullptr);
    }
  }
  EXPECT_EQ(names(), (std::set<std::string>{"reference.safetensors", "one.safetensors", "model"}));
}

TEST_F(Checkpoint, OfADirectoryThatCannotBeRenamedIsTheOldOneUntilItsIndexIsThere) {
  const auto path = folder_ / "model";
  const SaveOptions options{.max_shard_size = 1 << 20};
  for (int after = 0;; ++after) {
    fs::remove_all(path);
    version = 1;
    ASSERT_EQ(save_as(path, rows, 3, options), all(3, kFine));
    ObjectStore store(false, after);
    base::replace_syscalls(&store);
    version = 2;
    const std::vector<int> codes = save_as(path, columns, 3, options);
    base::replace_syscalls(nullptr);
    if (!store.failed()) break;
    EXPECT_EQ(codes, all(3, static_cast<int>(Code::kIo))) << after;
    version = 1;
    EXPECT_EQ(load_as(path, whole, 1), all(1, kFine)) << after;
    ObjectStore healthy(false);
    base::replace_syscalls(&healthy);
    EXPECT_EQ(save_as(path, rows, 3, options), all(3, kFine));  // clears away what the failed one left
    base::replace_syscalls(nullptr);
    EXPECT_EQ(std::distance(fs::directory_iterator(path), {}), 4);
  }
  version = 2;
  EXPECT_EQ(load_as(path, whole, 1), all(1, kFine));
  version = 0;
}

TEST_F(Checkpoint, IsWrittenInSequenceWhereThatIsAskedFor) {
  ASSERT_EQ(save_as(folder_ / "reference.safetensors", whole, 1), all(1, kFine));
  ASSERT_EQ(save_as(folder_ / "other.safetensors", columns, 3, {.sequential = true}), all(3, kFine));
  EXPECT_TRUE(bytes_of(folder_ / "other.safetensors") == bytes_of(folder_ / "reference.safetensors"));
}

/// A machine that does what its name says.
class NoExchange : public base::Syscalls {
 public:
  int exchange(const char*, const char*) override { return (errno = EINVAL, -1); }
};
class Interrupted : public base::Syscalls {
 public:
  int open(const char* p, int flags, mode_t mode) override { return now() ? -1 : Syscalls::open(p, flags, mode); }
  ssize_t pread(int fd, void* data, size_t bytes, off_t at) override { return now() ? -1 : Syscalls::pread(fd, data, bytes, at); }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) override { return now() ? -1 : Syscalls::pwrite(fd, data, bytes, at); }
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

/// Ranks in containers of their own.
class Apart : public base::Syscalls {
 public:
  explicit Apart(bool can_make) : can_make_(can_make) {}
  int memfd_create(const char* name, unsigned flags) override {
    return can_make_ ? Syscalls::memfd_create(name, flags) : (errno = ENOSYS, -1);
  }
  int open(const char* path, int flags, mode_t mode) override {
    return std::string(path).starts_with("/proc/") ? (errno = ENOENT, -1) : Syscalls::open(path, flags, mode);
  }

 private:
  bool can_make_;
};

TEST_F(Checkpoint, OfRanksThatShareNoMemoryHasTheSameBytes) {
  ASSERT_EQ(save_as(folder_ / "reference.safetensors", whole, 1), all(1, kFine));
  for (const bool can_make : {true, false}) {
    Apart machine(can_make);
    base::replace_syscalls(&machine);
    ASSERT_EQ(save_as(folder_ / "a.safetensors", columns, 5), all(5, kFine));
    base::replace_syscalls(nullptr);
    EXPECT_TRUE(bytes_of(folder_ / "a.safetensors") == bytes_of(folder_ / "reference.safetensors"));
  }
}

TEST_F(Checkpoint, ReplacesADirectoryWhereTwoCannotBeExchanged) {
  NoExchange machine;
  base::replace_syscalls(&machine);
  for (version = 1; version < 4; ++version) {
    ASSERT_EQ(save_as(folder_ / "model", rows, 3, {.max_shard_size = 1 << 20}), all(3, kFine));
    EXPECT_EQ(load_as(folder_ / "model", whole, 2), all(2, kFine));
  }
  version = 0;
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

TEST_F(Checkpoint, GoesOnAfterInterruptions) {
  Interrupted machine;
  base::replace_syscalls(&machine);
  EXPECT_EQ(save_as(folder_ / "a.safetensors", columns, 3), all(3, kFine));
  EXPECT_EQ(load_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
}

TEST_F(Checkpoint, OfAReadOnlyDirectoryIsOneErrorForAll) {
  ReadOnly machine;
  base::replace_syscalls(&machine);
  EXPECT_EQ(save_as(folder_ / "a.safetensors", rows, 3), all(3, static_cast<int>(Code::kIo)));
  EXPECT_EQ(save_as(folder_ / "a", rows, 3), all(3, static_cast<int>(Code::kIo)));
  EXPECT_TRUE(names().empty());
}

TEST_F(Checkpoint, OfAFileThatShrinksWhileItIsReadIsOneErrorForAll) {
  ASSERT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  Shrinking machine(folder_ / "a.safetensors");
  base::replace_syscalls(&machine);
  EXPECT_EQ(load_as(folder_ / "a.safetensors", columns, 2, false), all(2, static_cast<int>(Code::kCorrupt)));
}

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
  int exchange(const char* a, const char* b) override {
    step();
    return can_exchange_ ? Syscalls::exchange(a, b) : (errno = EINVAL, -1);
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

TEST_F(Checkpoint, IsTheOldOneOrTheNewOneWhereverItsProcessDied) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not follow threads started after fork()";
#endif
  for (const auto& [limit, can_exchange] : std::vector<std::pair<int64_t, bool>>{{0, true}, {1 << 20, true}, {1 << 20, false}}) {
    const auto path = folder_ / (limit == 0 ? "model.safetensors" : "model");
    version = 1;
    ASSERT_EQ(save_as(path, flat, 3, {.max_shard_size = limit}), all(3, kFine));
    int deaths = 0, seen_new = 0;
    for (bool died = true; died; ++deaths) {
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        Death death(deaths, can_exchange);
        base::replace_syscalls(&death);
        version = 2;
        ::_exit(save_as(path, rows, 3, {.max_shard_size = limit}) == all(3, kFine) ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      died = WIFSIGNALED(status);
      if (!died) {
        EXPECT_EQ(WEXITSTATUS(status), 0);
      }
      Held first(kSpecs[0].name, kSpecs[0].dtype, Region::whole(kSpecs[0].shape));
      load(*solo(), std::span(&first.view, 1), path, {.strict = false});
      version = first.memory[0] == (version = 1, value(kSpecs[0], 0)) ? 1 : 2;
      EXPECT_EQ(load_as(path, whole, 1), all(1, kFine)) << "killed at call " << deaths;
      seen_new += version == 2;
      version = 1;
      ASSERT_EQ(save_as(path, flat, 3, {.max_shard_size = limit}), all(3, kFine));  // clears away what the dead one left
      EXPECT_EQ(names().size(), limit == 0 ? 1u : 2u);
    }
    EXPECT_GT(deaths, 15);
    EXPECT_GT(seen_new, 1);
  }
  version = 0;
}

TEST_F(Checkpoint, OfADiskThatDoesHalfOfWhatItIsAskedIsWhole) {
  BadDisk disk(BadDisk::Call::kOpen, 0, 0);
  base::replace_syscalls(&disk);
  EXPECT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  EXPECT_EQ(load_as(folder_ / "a.safetensors", flat, 3), all(3, kFine));
}

TEST_F(Checkpoint, ThatCannotBeReadIsOneErrorForAll) {
  ASSERT_EQ(save_as(folder_ / "a.safetensors", rows, 2), all(2, kFine));
  for (int after = 0;; ++after) {
    BadDisk disk(BadDisk::Call::kRead, after, EIO);
    base::replace_syscalls(&disk);
    const std::vector<int> codes = load_as(folder_ / "a.safetensors", rows, 2, false);
    base::replace_syscalls(nullptr);
    if (!disk.failed()) break;
    EXPECT_EQ(codes, all(2, static_cast<int>(Code::kIo)));
  }
  EXPECT_EQ(load_as(folder_ / "nothing.safetensors", rows, 2, false), all(2, static_cast<int>(Code::kNotFound)));
}

TEST_F(Checkpoint, AtPathsThatAreNoneIsATypedErrorOnAllBeforeAnythingIsWritten) {
  fs::create_symlink("loop", folder_ / "loop");
  std::ofstream(folder_ / "a.safetensors") << "precious";
  const std::string nul = (folder_ / "a.safetensors").string() + std::string("\0.safetensors", 13);
  const std::pair<fs::path, Code> cases[] = {{folder_ / "loop" / "a.safetensors", Code::kIo},
                                             {folder_ / "loop", Code::kInvalidArgument},
                                             {folder_ / std::string(300, 'n'), Code::kIo},
                                             {folder_ / std::string(300, 'n') / "a.safetensors", Code::kIo},
                                             {nul, Code::kInvalidArgument}};
  for (const auto& [path, code] : cases) {
    SCOPED_TRACE(path.string());
    EXPECT_EQ(save_as(path, rows, 2), all(2, static_cast<int>(code)));
  }
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", "loop"}));
  EXPECT_EQ(bytes_of(folder_ / "a.safetensors"), "precious");
}

TEST_F(Checkpoint, OfARankThatNeverComesTimesOutOnAll) {
  const SaveOptions options{.timeout = std::chrono::seconds(1)};
  EXPECT_EQ(on_ranks(3,
                     [&](Group& group) {
                       if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
                       auto held = hold(rows, group.rank(), 3, true);
                       save(group, views_of(held), folder_ / "a.safetensors", options);
                     }),
            all(3, static_cast<int>(Code::kTimeout)));
  EXPECT_TRUE(names().empty());
}

TEST_F(Checkpoint, WhoseProgressCannotBeToldIsOneErrorForAllAtOnce) {
  ASSERT_EQ(save_as(folder_ / "a.safetensors", rows, 3), all(3, kFine));
  const std::string before = bytes_of(folder_ / "a.safetensors");
  for (const bool at_the_end : {false, true}) {
    const auto tell = [&](int64_t done, int64_t total) {
      if (!at_the_end || done >= total) throw Error(Code::kPeerFailed, "told no more");
    };
    for (const bool sequential : {false, true}) {
      version = 7;
      SaveOptions options;
      options.progress = tell;
      options.sequential = sequential;
      EXPECT_EQ(save_as(folder_ / "a.safetensors", rows, 3, options), all(3, static_cast<int>(Code::kPeerFailed)));
      version = 0;
      EXPECT_EQ(bytes_of(folder_ / "a.safetensors"), before);
      EXPECT_EQ(names(), std::set<std::string>{"a.safetensors"});
    }
    EXPECT_EQ(on_ranks(3,
                       [&](Group& group) {
                         auto held = hold(rows, group.rank(), 3, false);
                         LoadOptions options;
                         options.progress = tell;
                         options.verify = at_the_end;
                         load(group, views_of(held), folder_ / "a.safetensors", options);
                       }),
              all(3, static_cast<int>(Code::kPeerFailed)));
  }
}

TEST_F(Checkpoint, OfRanksThatAreAskedForOtherThingsSaysWhichAndWritesNothing) {
  struct Case {
    void (*differ)(SaveOptions&, fs::path&, int rank);
    const char* message;
  };
  constexpr Case kCases[] = {
      {[](SaveOptions& options, fs::path&, int rank) { options.max_shard_size = rank == 2 ? 0 : 5'000'000'000; },
       "save(): max_shard_size is 5 GB on rank 0, none on rank 2; give all ranks the same"},
      {[](SaveOptions& options, fs::path&, int rank) { options.max_shard_size = 1000 + rank; },
       "save(): max_shard_size is 1 KB on rank 0, 1001 bytes on rank 1; give all ranks the same"},
      {[](SaveOptions& options, fs::path&, int rank) { options.checksums = rank != 1; },
       "save(): checksums is on on rank 0, off on rank 1; give all ranks the same"},
      {[](SaveOptions& options, fs::path&, int rank) { options.dtype = rank == 1 ? std::optional(DType::kF16) : std::nullopt; },
       "save(): dtype is none on rank 0, F16 on rank 1; give all ranks the same"},
  };
  for (const Case& c : kCases) {
    on_ranks(3, [&](Group& group) {
      auto held = hold(rows, group.rank(), 3, true);
      std::erase_if(held, [](const Held& one) { return one.view.name == "tiny"; });  // which no option casts
      SaveOptions options;
      fs::path path = folder_ / "d";
      c.differ(options, path, group.rank());
      try {
        save(group, views_of(held), path, options);
        ADD_FAILURE() << c.message;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kInvalidArgument);
        EXPECT_STREQ(error.what(), c.message);
      }
    });
    EXPECT_TRUE(names().empty());
  }
}

TEST_F(Checkpoint, HasTheMetadataOfRank0) {
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       auto held = hold(rows, group.rank(), 2, true);
                       SaveOptions options;
                       options.metadata = {{"rank", std::to_string(group.rank())}};
                       if (group.rank() == 1) options.metadata["much"] = std::string(9000, 'x');
                       save(group, views_of(held), folder_ / "a.safetensors", options);
                     }),
            all(2, kFine));
  EXPECT_EQ(load_as(folder_ / "a.safetensors", columns, 3), all(3, kFine));
  const std::string bytes = bytes_of(folder_ / "a.safetensors");
  EXPECT_NE(bytes.find(R"("rank":"0")"), std::string::npos);
  EXPECT_EQ(bytes.find("much"), std::string::npos);
}

}  // namespace
}  // namespace shardow
