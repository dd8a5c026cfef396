// Storage that takes files only from front to end, and may be unable to rename: mounts of object stores.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>

#include "delegate.h"
#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

/// What a mount of an object store does: files are written from front to end and appear when they are closed, if all
/// their writes went well; where `renames` is false nothing is renamed.
class ObjectStore : public base::Syscalls {
 public:
  explicit ObjectStore(bool renames, int fail_after = -1) : renames_(renames), left_(fail_after) {}

  int open(const char* path, int flags, mode_t mode) override {
    if ((flags & O_CREAT) == 0) return Syscalls::open(path, flags, mode);
    if (const int error = fs::exists(path) ? EEXIST : 0; error != 0 && (flags & O_EXCL) != 0) return refuse(error);
    const std::string part = fmt::format("{}part-{}-{}", testing::TempDir(), ::getpid(), parts_++);
    const int fd = Syscalls::open(part.c_str(), flags, mode);
    const std::lock_guard lock(mutex_);
    if (fd >= 0) open_[fd] = {path, part};
    return fd;
  }
  int close(int fd) override {
    const std::lock_guard lock(mutex_);
    if (const auto found = open_.find(fd); found != open_.end()) {
      found->second.failed ? fs::remove(found->second.part)
                           : (fs::rename(found->second.part, found->second.path), true);
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
  int rename(const char* from, const char* to) override {
    return renames_ ? Syscalls::rename(from, to) : refuse(ENOSYS);
  }

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

TEST_F(Checkpoints, GoesToStorageThatTakesFilesOnlyFromFrontToEnd) {
  ASSERT_EQ(save_as(folder_ / "reference.safetensors", whole, 1), all(1, kFine));
  const std::string reference = bytes_of(folder_ / "reference.safetensors");
  for (const bool renames : {true, false}) {
    for (const auto& [name, sharding] : kShardings) {
      if (kSlow && std::string(name) != "columns") continue;
      SCOPED_TRACE(std::string(name) + (renames ? ", renaming" : ", not renaming"));
      ObjectStore store(renames);
      machine_ = &store;
      for (int round = 0; round < 2; ++round) {
        EXPECT_EQ(save_as(folder_ / "one.safetensors", sharding, 3), all(3, kFine));
        EXPECT_EQ(save_as(folder_ / "model", sharding, 3, {.max_shard_size = 1 << 20}), all(3, kFine));
        EXPECT_TRUE(bytes_of(folder_ / "one.safetensors") == reference);
        EXPECT_EQ(load_as(folder_ / "model", whole, 1), all(1, kFine));
        EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "model"), {}), 4);  // three files and the index
      }
      machine_ = nullptr;
    }
  }
  EXPECT_EQ(names(), (std::set<std::string>{"reference.safetensors", "one.safetensors", "model"}));
}

TEST_F(Checkpoints, OfADirectoryThatCannotBeRenamedIsTheOldOneUntilItsIndexIsThere) {
  const auto path = folder_ / "model";
  const SaveOptions options{.max_shard_size = 1 << 20};
  for (int after = 0;; ++after) {
    fs::remove_all(path);
    version = 1;
    ASSERT_EQ(save_as(path, rows, 3, options), all(3, kFine));
    ObjectStore store(false, after);
    machine_ = &store;
    version = 2;
    const std::vector<int> codes = save_as(path, columns, 3, options);
    machine_ = nullptr;
    if (!store.failed()) break;
    EXPECT_EQ(codes, all(3, static_cast<int>(Code::kIo))) << after;
    version = 1;
    EXPECT_EQ(load_as(path, whole, 1), all(1, kFine)) << after;
    ObjectStore healthy(false);
    machine_ = &healthy;
    EXPECT_EQ(save_as(path, rows, 3, options), all(3, kFine));  // clears away what the failed one left
    machine_ = nullptr;
    EXPECT_EQ(std::distance(fs::directory_iterator(path), {}), 4);
  }
  version = 2;
  EXPECT_EQ(load_as(path, whole, 1), all(1, kFine));
  version = 0;
}

class WithoutBlocks : public Delegate {
 public:
  using Delegate::Delegate;
  bool moves_blocks() const noexcept override { return false; }
};

TEST_F(Checkpoints, OfRanksThatCannotSendBlocksIsRefusedOnAllWhereStorageNeedsThem) {
  FrontToEnd storage;
  machine_ = &storage;
  const auto codes = on_ranks(2, [&](Group& group) {
    WithoutBlocks alone(group);
    auto held = hold(rows, group.rank(), 2, true);
    try {
      save(alone, views_of(held), folder_ / "a.safetensors");
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("cpu:gloo,cuda:nccl"), std::string::npos) << error.what();
      throw;
    }
  });
  EXPECT_EQ(codes, all(2, static_cast<int>(Code::kUnsupported)));
  EXPECT_TRUE(names().empty());
}

}  // namespace
}  // namespace shardow
