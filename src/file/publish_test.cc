// A save knows its files: what it replaces, what it leaves alone, whom it waits for, and what it puts right after a dead one.
#include "file/publish.h"

#include <sys/stat.h>

#include <atomic>
#include <cerrno>

#include "file/checkpoint_fixture.h"
#include "file/index.h"

namespace shardow {
namespace {

constexpr const char* kNonce = "0123456789abcdef";

class Saving : public Checkpoint {
 protected:
  ~Saving() override { version = 0; }

  void save_version(int which, const fs::path& path, const SaveOptions& options = {}) {
    version = which;
    ASSERT_EQ(save_as(path, rows, 2, options), all(2, kFine));
  }
  void expect_version(int which, const fs::path& path) {
    version = which;
    EXPECT_EQ(load_as(path, flat, 2), all(2, kFine));
  }
  std::vector<int> save_named(const std::vector<std::string>& names) {
    return on_ranks(2, [&](Group& group) {
      auto held = hold(rows, group.rank(), 2, true);
      std::vector<SaveFile> files;
      for (const std::string& name : names) files.push_back({name, views_of(held)});
      save(group, files, folder_ / "model");
    });
  }
  void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
  std::set<std::string> in(const fs::path& directory) const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(directory)) found.insert(entry.path().filename().string());
    return found;
  }
};

const SaveOptions kShards{.max_shard_size = 1 << 20};

TEST_F(Saving, ReplacesWhatTheOldIndexNamesAndItsOwnPatternAndNothingElse) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  const std::set<std::string> others = {"model-ema.safetensors",
                                        "model-00001.safetensors",
                                        "model-1-of-2.safetensors",
                                        "ema-0.9.safetensors",
                                        "model-abc-00001-of-00002.safetensors",
                                        "weights.safetensors.bak"};
  for (const std::string& name : others) write(path / name, "of a user: " + name);
  write(path / "model-00007-of-00009.safetensors", "of a checkpoint that was cut off");
  save_version(2, path);
  expect_version(2, path);
  std::set<std::string> expected = others;
  expected.insert("model.safetensors");
  EXPECT_EQ(in(path), expected);
  for (const std::string& name : others) EXPECT_EQ(bytes_of(path / name), "of a user: " + name);
}

TEST_F(Saving, OfNamedFilesLeavesAModelBesideThemAlone) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  version = 2;
  ASSERT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, kFine));
  expect_version(1, path);
  version = 3;
  ASSERT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, kFine));
  expect_version(3, path / "ema-0.99.safetensors");
  save_version(4, path);
  expect_version(3, path / "ema-0.9.safetensors");
  EXPECT_EQ(in(path), (std::set<std::string>{"model.safetensors", "ema-0.9.safetensors", "ema-0.99.safetensors"}));
}

TEST_F(Saving, ClearsAwayWhatDeadSavesLeftAndNothingElse) {
  const std::string nonce = kNonce;
  fs::create_directories(folder_ / (".a.safetensors." + nonce + ".tmp"));
  write(folder_ / (".a.safetensors." + nonce + "-renamed.tmp"), "half");
  const std::set<std::string> others = {".another.safetensors." + nonce + ".tmp", ".a." + nonce + ".tmp", ".a.safetensors.4567.tmp",
                                        ".a.safetensors.notes.tmp", ".a.safetensors." + nonce + ".tmp.bak"};
  for (const std::string& name : others) write(folder_ / name, "somebody else's");
  save_version(1, folder_ / "a.safetensors");
  std::set<std::string> expected = others;
  expected.insert("a.safetensors");
  EXPECT_EQ(names(), expected);
}

TEST_F(Saving, WaitsForALivingSaveToTheSamePathAndSaysSoWhereThatDoesNotEnd) {
  const auto path = folder_ / "a.safetensors";
  save_version(1, path);
  const auto draft = file::temporary_path(path, kNonce, file::Temporary::kDraft);
  write(draft, "of a save that goes on");
  {
    base::Lock living;
    ASSERT_EQ(living.take(draft), base::Lock::Result::kHeld);
    version = 2;
    EXPECT_EQ(save_as(path, rows, 2, {.timeout = std::chrono::milliseconds(400)}), all(2, static_cast<int>(Code::kTimeout)));
    EXPECT_EQ(bytes_of(draft), "of a save that goes on");
    expect_version(1, path);
    save_version(3, folder_ / "b.safetensors");  // another name beside it does not wait
    std::thread ends([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      living.release();
    });
    save_version(4, path);
    ends.join();
  }
  expect_version(4, path);
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", "b.safetensors"}));
}

TEST_F(Saving, OfManyAtOnceToOnePathAreOneAfterTheOtherWhileReadersFindAWholeOne) {
  for (const char* const name : {"a.safetensors", "model"}) {
    SCOPED_TRACE(name);
    const auto path = folder_ / name;
    Held held("w", DType::kF32, Region::whole({3000}));
    const auto save_all = [&](Held& one, float value) {
      for (size_t i = 0; i < 3000; ++i) std::memcpy(one.memory.data() + 4 * i, &value, 4);
      save(*solo(), std::span(&one.view, 1), path);
    };
    save_all(held, 0);
    std::atomic<int> saved{0}, failed{0};
    std::vector<std::thread> savers;
    for (int saver = 0; saver < 4; ++saver) {
      savers.emplace_back([&, saver] {
        Held mine("w", DType::kF32, Region::whole({3000}));
        for (int round = 0; round < 5; ++round) {
          try {
            save_all(mine, static_cast<float>(saver * 100 + round));
            ++saved;
          } catch (const Error& error) {
            ++failed;
            ADD_FAILURE() << error.what();
          }
        }
      });
    }
    while (saved + failed < 20) {
      Held read("w", DType::kF32, Region::whole({3000}));
      try {
        load(*solo(), std::span(&read.view, 1), path);
      } catch (const Error& error) {  // replaced between two steps of reading is the reader's own matter
        EXPECT_NE(error.code(), Code::kNotFound) << error.what();
      }
    }
    for (std::thread& saver : savers) saver.join();
    EXPECT_EQ(saved, 20);
  }
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", "model"}));
}

/// Somebody who works in the directory at the instant of the exchange, before or after it.
class Busy : public base::Syscalls {
 public:
  Busy(fs::path directory, bool can_exchange, bool before) : directory_(std::move(directory)), can_(can_exchange), before_(before) {}
  int exchange(const char* a, const char* b) override {
    if (!can_) return (errno = EINVAL, -1);
    if (before_) work(b);
    const int result = Syscalls::exchange(a, b);
    if (!before_) work(a);
    return result;
  }
  int rename(const char* from, const char* to) override {
    const bool away = !can_ && from == directory_.string() && !fs::exists(to);
    if (away && before_) work(from);
    const int result = Syscalls::rename(from, to);
    if (away && !before_) work(to);
    return result;
  }

 private:
  static void work(const fs::path& in) {
    std::ofstream(in / "optimizer.pt") << "appeared";
    fs::create_directories(in / "runs" / "new");
    std::ofstream(in / "runs" / "new" / "events") << "appeared too";
    std::ofstream(in / "config.json.part") << "second";
    fs::rename(in / "config.json.part", in / "config.json");
    fs::rename(in / "notes.part", in / "notes");
  }
  fs::path directory_;
  bool can_, before_;
};

TEST_F(Saving, KeepsWhatAppearsInItsDirectoryWhileItIsPublished) {
  const auto path = folder_ / "model";
  for (const bool can_exchange : {true, false}) {
    for (const bool before : {true, false}) {
      SCOPED_TRACE(std::to_string(can_exchange) + std::to_string(before));
      fs::remove_all(path);
      save_version(1, path, kShards);
      write(path / "config.json", "first");
      write(path / "notes.part", "renamed");
      fs::create_directories(path / "runs");
      write(path / "runs" / "old", "as it was");
      ASSERT_EQ(::mkfifo((path / "pipe").c_str(), 0600), 0);
      Busy busy(path, can_exchange, before);
      base::replace_syscalls(&busy);
      save_version(2, path);
      base::replace_syscalls(nullptr);
      expect_version(2, path);
      EXPECT_EQ(bytes_of(path / "optimizer.pt"), "appeared");
      EXPECT_EQ(bytes_of(path / "runs" / "new" / "events"), "appeared too");
      EXPECT_EQ(bytes_of(path / "runs" / "old"), "as it was");
      EXPECT_EQ(bytes_of(path / "config.json"), "second");
      EXPECT_EQ(bytes_of(path / "notes"), "renamed");
      EXPECT_EQ(in(path), (std::set<std::string>{"model.safetensors", "config.json", "notes", "optimizer.pt", "pipe", "runs"}));
      EXPECT_EQ(names(), (std::set<std::string>{"model"}));
    }
  }
}

/// A machine without an exchange, whose rename number `fatal` fails.
class FailingRename : public base::Syscalls {
 public:
  explicit FailingRename(int fatal) : left_(fatal) {}
  int exchange(const char*, const char*) override { return (errno = EINVAL, -1); }
  int rename(const char* from, const char* to) override { return left_-- == 0 ? (errno = EIO, -1) : Syscalls::rename(from, to); }
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
    base::replace_syscalls(&machine);
    version = 2;
    const std::vector<int> codes = save_as(path, rows, 2, kShards);
    base::replace_syscalls(nullptr);
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
  base::replace_syscalls(&full);
  version = 2;
  EXPECT_EQ(save_as(path, rows, 2), all(2, static_cast<int>(Code::kOutOfSpace)));
  base::replace_syscalls(nullptr);
  expect_version(1, path);
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
  save_version(3, path);
  expect_version(3, path);
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
  int exchange(const char*, const char*) override { return (errno = ENOSYS, -1); }
};

TEST_F(Saving, OfNamedFilesIsNotWrittenOverOthersWhereNothingCanBeRenamed) {
  NoRename storage;
  base::replace_syscalls(&storage);
  version = 1;
  ASSERT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, kFine));
  version = 2;
  EXPECT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, static_cast<int>(Code::kUnsupported)));
  base::replace_syscalls(nullptr);
  expect_version(1, folder_ / "model" / "ema-0.9.safetensors");
  expect_version(1, folder_ / "model" / "ema-0.99.safetensors");
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

/// Storage of a kind that other machines may mount, without locks.
class Network : public base::Syscalls {
 public:
  int flock(int, int) override { return (errno = ENOSYS, -1); }
  int statfs(const char* path, struct statfs* out) override {
    const int result = Syscalls::statfs(path, out);
    out->f_type = 0x6969;  // NFS
    return result;
  }
};

TEST_F(Saving, OnStorageThatOtherMachinesMountLeavesWhatIsYoung) {
  const auto path = folder_ / "a.safetensors";
  const auto young = file::temporary_path(path, kNonce, file::Temporary::kDraft);
  const auto aged = file::temporary_path(path, "00000000aaaaaaaa", file::Temporary::kDraft);
  write(young, "another machine's");
  write(aged, "a dead one's");
  fs::last_write_time(aged, fs::file_time_type::clock::now() - std::chrono::hours(2));
  Network network;
  base::replace_syscalls(&network);
  save_version(1, path);
  base::replace_syscalls(nullptr);
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", young.filename().string()}));
}

TEST_F(Saving, TakesEveryNameThatTheFileSystemTakes) {
  for (const size_t length : {224u, 225u, 226u, 240u, 255u}) {
    std::string name;
    while (name.size() + 2 <= length) name += "\xc3\xa4";
    name.resize(length, 'x');
    SCOPED_TRACE(length);
    save_version(1, folder_ / name, kShards);
    save_version(2, folder_ / name, kShards);
    expect_version(2, folder_ / name);
    EXPECT_EQ(names(), (std::set<std::string>{name}));
    fs::remove_all(folder_ / name);
    const std::string one = name.substr(0, length - 12) + ".safetensors";
    save_version(3, folder_ / one);
    expect_version(3, folder_ / one);
    fs::remove_all(folder_ / one);
  }
}

TEST_F(Saving, RefusesPathsThatNoCheckpointCanHaveBeforeAnythingIsWritten) {
  const int invalid = static_cast<int>(Code::kInvalidArgument), io = static_cast<int>(Code::kIo);
  fs::create_symlink("loop", folder_ / "loop");
  fs::create_directory(folder_ / "directory.safetensors");
  fs::create_directories(folder_ / "model" / "model.safetensors");
  write(folder_ / "file", "a file");
  write(folder_ / "precious", "not to be written over");
  ASSERT_EQ(::mkfifo((folder_ / "pipe.safetensors").c_str(), 0600), 0);
  const std::set<std::string> before = names();
  const std::vector<std::pair<fs::path, int>> cases = {
      {folder_ / "loop", invalid},
      {folder_ / "loop" / "model", io},
      {folder_ / "directory.safetensors", invalid},
      {folder_ / "model", invalid},
      {folder_ / "file", invalid},
      {folder_ / "file" / "model", invalid},
      {folder_ / "pipe.safetensors", invalid},
      {folder_ / std::string("precious\0.safetensors", 21), invalid},
      {folder_ / std::string(256, 'n'), io},
      {folder_ / ".." / "..", invalid},
  };
  for (const auto& [path, code] : cases) EXPECT_EQ(save_as(path, rows, 2), all(2, code)) << path;
  EXPECT_EQ(names(), before);
  EXPECT_EQ(bytes_of(folder_ / "precious"), "not to be written over");
}

/// A directory that cannot be moved: a mount point, or one of a lower layer of an overlay.
class Fixed : public base::Syscalls {
 public:
  Fixed(fs::path path, int error) : path_(std::move(path)), error_(error) {}
  int rename(const char* from, const char* to) override {
    return from == path_.string() ? (errno = error_, -1) : Syscalls::rename(from, to);
  }
  int exchange(const char*, const char*) override { return (errno = error_, -1); }
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
    base::replace_syscalls(&machine);
    version = 2;
    EXPECT_EQ(save_as(folder_ / "model", rows, 2), all(2, static_cast<int>(Code::kUnsupported)));
    base::replace_syscalls(nullptr);
    EXPECT_EQ(machine.written, 0u);
  }
  expect_version(1, folder_ / "model");
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

TEST_F(Saving, TakesMoreFilesThanAProcessMayOpen) {
  fs::remove_all(folder_);
  if (fs::is_directory("/dev/shm")) folder_ = fs::path("/dev/shm") / folder_.filename();  // thousands of flushes
  fs::create_directories(folder_);
  constexpr int kTensors = 1100;
  std::vector<Held> held;
  for (int i = 0; i < kTensors; ++i) {
    held.emplace_back("t" + std::to_string(i), DType::kF32, Region::whole({4}));
    std::fill(held.back().memory.begin(), held.back().memory.end(), static_cast<std::byte>(i % 251));
  }
  class Counting : public base::Syscalls {
   public:
    int open(const char* path, int flags, mode_t mode) override {
      const int fd = Syscalls::open(path, flags, mode);
      most = std::max(most, fd);
      return fd;
    }
    int most = 0;
  } counting;
  base::replace_syscalls(&counting);
  save(*solo(), views_of(held), folder_ / "model", {.max_shard_size = 16});
  base::replace_syscalls(nullptr);
  EXPECT_LT(counting.most, 200);
  EXPECT_EQ(in(folder_ / "model").size(), kTensors + 1u);
  for (const int i : {0, 1, 500, kTensors - 1}) {
    Held read("t" + std::to_string(i), DType::kF32, Region::whole({4}));
    load(*solo(), std::span(&read.view, 1),
         folder_ / "model" / file::read_index(base::File::open(folder_ / "model" / file::kIndexName)).at(read.view.name));
    EXPECT_EQ(read.memory, held[static_cast<size_t>(i)].memory);
  }
}

}  // namespace
}  // namespace shardow
