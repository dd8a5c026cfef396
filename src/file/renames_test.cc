// Saves where a rename fails, is not to be had, or where a dead one stopped between two of them.
#include <cerrno>
#include <functional>
#include <utility>

#include "file/draft.h"
#include "file/saving_fixture.h"

namespace shardow {
namespace {

/// A machine without an exchange, whose rename number `fatal` fails.
class FailingRename : public base::Syscalls {
 public:
  explicit FailingRename(int fatal) : left_(fatal) {}
  int rename_exchange(const char*, const char*) override { return (errno = EINVAL, -1); }
  int rename(const char* from, const char* to) override {
    return left_-- == 0 ? (errno = EIO, -1) : Syscalls::rename(from, to);
  }
  bool failed() const { return left_ < 0; }

 private:
  int left_;
};

TEST_F(Saving, WithoutAnExchangeGoesBackWhereARenameFails) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  write(path / "config.json", "mine");
  int failures = 0;
  for (int fatal = 0;; ++fatal) {
    FailingRename machine(fatal);
    machine_.syscalls = &machine;
    version = 2;
    const std::vector<int> codes = save_as(path, rows, 2, kShards);
    machine_.syscalls = nullptr;
    if (!machine.failed()) break;
    if (codes == all(2, kFine)) {  // it was no rename that matters
      save_version(1, path, kShards);
      continue;
    }
    ++failures;
    expect_version(1, path);
    EXPECT_EQ(bytes_of(path / "config.json"), "mine");
    EXPECT_EQ(names(), (std::set<std::string>{"model"})) << fatal;
  }
  EXPECT_GE(failures, 3);
  expect_version(2, path);
}

/// Somebody who takes this save for a dead one removes what it made, just before the checkpoint is asked to move there;
/// and may publish before it is back.
class Cleaner : public base::Syscalls {
 public:
  explicit Cleaner(std::function<void()> then) : then_(std::move(then)) {}
  int rename(const char* from, const char* to) override {
    const bool first = !cleaned && fs::path(from).filename() == "model";
    if (first) fs::remove_all(to);
    const int result = Syscalls::rename(from, to);
    if (first) then_();
    cleaned |= first;
    return result;
  }
  bool cleaned = false;

 private:
  const std::function<void()> then_;
};

TEST_F(Saving, ACheckpointThatMovesWhereItIsAskedWhetherItMayComesBack) {
  const auto path = folder_ / "model";
  for (const bool published : {false, true}) {
    save_version(1, path, kShards);
    write(path / "config.json", "mine");
    Cleaner machine([&] {
      if (published) fs::create_directory(path), write(path / "model.safetensors", "another save's");
    });
    machine_.syscalls = &machine;
    save_version(2, path, kShards);
    machine_.syscalls = nullptr;
    EXPECT_TRUE(machine.cleaned);
    expect_version(2, path);
    EXPECT_EQ(bytes_of(path / "config.json"), "mine");
    EXPECT_EQ(names(), (std::set<std::string>{"model"}));
  }
}

TEST_F(Saving, WhereItCannotComeBackTheNextOneFindsIt) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  class Stuck : public Cleaner {
   public:
    Stuck() : Cleaner([] {}) {}
    int rename(const char* from, const char* to) override {
      return cleaned ? (errno = EIO, -1) : Cleaner::rename(from, to);
    }
  } machine;
  machine_.syscalls = &machine;
  version = 2;
  EXPECT_EQ(save_as(path, rows, 2, kShards), all(2, static_cast<int>(Code::kIo)));
  machine_.syscalls = nullptr;
  expect_version(1, path);
  save_version(3, path, kShards);
  expect_version(3, path);
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

TEST_F(Saving, ThatDiedBetweenTwoRenamesLeavesTheOldOneForTheNextLoadAndTheNextSave) {
  const auto path = folder_ / "model", old = file::temporary_path(path, kNonce, file::Temporary::kOld);
  save_version(1, path, kShards);
  fs::create_directories(file::temporary_path(path, kNonce, file::Temporary::kDraft));
  fs::rename(path, old);
  expect_version(1, path);
  EXPECT_FALSE(fs::exists(path));  // reading changes nothing
  class Full : public base::Syscalls {
    int statfs(const char* at, struct statfs* out) override {
      const int result = Syscalls::statfs(at, out);
      out->f_bavail = 1;
      return result;
    }
  } full;
  machine_.syscalls = &full;
  version = 2;
  EXPECT_EQ(save_as(path, rows, 2), all(2, static_cast<int>(Code::kOutOfSpace)));
  machine_.syscalls = nullptr;
  expect_version(1, path);
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
  save_version(3, path);
  expect_version(3, path);
}

/// A rename that an earlier save gave up is done just before the old directory is put back.
class Late : public base::Syscalls {
 public:
  explicit Late(const fs::path& path) : path_(path) {}
  int rename(const char* from, const char* to) override {
    if (to == path_ && !fs::exists(path_))
      fs::rename(file::temporary_path(path_, kNonce, file::Temporary::kDraft), path_);
    return Syscalls::rename(from, to);
  }

 private:
  const fs::path path_;
};

TEST_F(Saving, GoesOnWhereALateRenameComesBeforeTheOldOneIsPutBack) {
  const auto path = folder_ / "model", draft = file::temporary_path(path, kNonce, file::Temporary::kDraft);
  save_version(1, path);
  write(path / "config.json", "mine");
  save_version(2, folder_ / "given up");
  fs::rename(path, file::temporary_path(path, kNonce, file::Temporary::kOld));
  fs::rename(folder_ / "given up", draft);
  Late machine(path);
  machine_.syscalls = &machine;
  save_version(3, path);
  machine_.syscalls = nullptr;
  expect_version(3, path);
  EXPECT_EQ(bytes_of(path / "config.json"), "mine");
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

/// Without an exchange; what was replaced can be removed in part alone. From the rename number `last` to the
/// checkpoint's name on, none is.
class Crumbling : public FailingRename {
 public:
  Crumbling(fs::path path, int last) : FailingRename(1 << 20), path_(std::move(path)), left_(last) {}
  int unlink(const char* path) override {
    const bool shard = file::is_shard_name(fs::path(path).filename().string());
    return shard && removed_++ > 0 ? (errno = EIO, -1) : Syscalls::unlink(path);
  }
  int rename(const char* from, const char* to) override {
    if (to == path_ && left_-- <= 0) return (errno = EIO, -1);
    return FailingRename::rename(from, to);
  }

 private:
  const fs::path path_;
  int left_;
  std::atomic<int> removed_ = 0;
};

TEST_F(Saving, WhatIsHalfRemovedIsNeverTakenForTheCheckpoint) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  Crumbling machine(path, 1);
  machine_.syscalls = &machine;
  save_version(2, path, kShards);
  ASSERT_EQ(names().size(), 2u);
  EXPECT_TRUE(names().begin()->ends_with("-spent.tmp"))
      << *names().begin();  // were the new one removed, it would not be looked for here
  version = 3;
  EXPECT_EQ(save_as(path, rows, 2, kShards),
            all(2, static_cast<int>(Code::kIo)));  // in between two renames, and cannot go back
  machine_.syscalls = nullptr;
  ASSERT_FALSE(fs::exists(path));
  for (const std::string& name : names()) {
    if (!name.ends_with("-old.tmp"))
      fs::last_write_time(folder_ / name, fs::file_time_type::clock::now() + std::chrono::hours(1));
  }
  expect_version(2, path);
  save_version(4, path, kShards);
  expect_version(4, path);
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

/// Somebody who clears away a directory that was replaced, just before its save does.
class Tidy : public base::Syscalls {
 public:
  int rename(const char* from, const char* to) override {
    if (std::string_view(to).ends_with("-spent.tmp")) fs::remove_all(from);
    return Syscalls::rename(from, to);
  }
};

TEST_F(Saving, WhoseOldDirectoryIsRemovedMeanwhileKeepsWhatIsOthersInTheNewOne) {
  const auto path = folder_ / "model";
  save_version(1, path);
  write(path / "config.json", "mine");
  Tidy machine;
  machine_.syscalls = &machine;
  save_version(2, path);
  machine_.syscalls = nullptr;
  expect_version(2, path);
  EXPECT_EQ(bytes_of(path / "config.json"), "mine");
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

TEST_F(Saving, FindsTheFilesOfAnOldDirectoryThatIsMissing) {
  version = 1;
  ASSERT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, kFine));
  fs::rename(folder_ / "model", file::temporary_path(folder_ / "model", kNonce, file::Temporary::kOld));
  expect_version(1, folder_ / "model" / "ema-0.99.safetensors");
}

TEST_F(Saving, BringsBackWhatADeadSaveHadNotYetMoved) {
  const auto path = folder_ / "model";
  save_version(1, path);
  const auto old = file::temporary_path(path, kNonce, file::Temporary::kOld);
  fs::create_directories(old / "runs");
  write(old / "model.safetensors", "replaced");
  write(old / "model-00001-of-00002.safetensors", "replaced");
  write(old / "optimizer.pt", "appeared");
  write(old / "runs" / "events", "appeared too");
  save_version(2, path, kShards);
  expect_version(2, path);
  EXPECT_EQ(bytes_of(path / "optimizer.pt"), "appeared");
  EXPECT_EQ(bytes_of(path / "runs" / "events"), "appeared too");
  EXPECT_FALSE(fs::exists(path / "model-00001-of-00002.safetensors"));
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

class NoRename : public base::Syscalls {
 public:
  int rename(const char*, const char*) override { return (errno = ENOSYS, -1); }
  int rename_exchange(const char*, const char*) override { return (errno = ENOSYS, -1); }
};

TEST_F(Saving, OfNamedFilesIsNotWrittenOverOthersWhereNothingCanBeRenamed) {
  NoRename storage;
  machine_.syscalls = &storage;
  version = 1;
  ASSERT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, kFine));
  version = 2;
  EXPECT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, static_cast<int>(Code::kUnsupported)));
  machine_.syscalls = nullptr;
  expect_version(1, folder_ / "model" / "ema-0.9.safetensors");
  expect_version(1, folder_ / "model" / "ema-0.99.safetensors");
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

/// A directory that cannot be moved: a mount point, or one of a lower layer of an overlay.
class Fixed : public base::Syscalls {
 public:
  Fixed(fs::path path, int error) : path_(std::move(path)), error_(error) {}
  int rename(const char* from, const char* to) override {
    return from == path_.string() ? (errno = error_, -1) : Syscalls::rename(from, to);
  }
  int rename_exchange(const char*, const char*) override { return (errno = error_, -1); }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    written += bytes;
    return Syscalls::pwrite(fd, data, bytes, offset);
  }
  std::atomic<size_t> written{0};

 private:
  fs::path path_;
  int error_;
};

TEST_F(Saving, OntoADirectoryThatCannotBeMovedIsRefusedBeforeAnythingIsWritten) {
  save_version(1, folder_ / "model", kShards);
  for (const int error : {EBUSY, EXDEV}) {
    Fixed machine(folder_ / "model", error);
    machine_.syscalls = &machine;
    version = 2;
    EXPECT_EQ(save_as(folder_ / "model", rows, 2), all(2, static_cast<int>(Code::kUnsupported)));
    machine_.syscalls = nullptr;
    EXPECT_EQ(machine.written, 0u);
  }
  expect_version(1, folder_ / "model");
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

}  // namespace
}  // namespace shardow
