// A save knows its files: what it replaces, what it leaves alone, and which names it takes.
#include <sys/stat.h>

#include "file/draft.h"
#include "file/index.h"
#include "file/saving_fixture.h"

namespace shardow {
namespace {

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

/// Somebody who removes the checkpoint that is there, before call number `at`, and until a new one is in its place.
class Removing : public base::Syscalls {
 public:
  Removing(fs::path directory, bool can_exchange, int at)
      : directory_(std::move(directory)), can_(can_exchange), left_(at) {}
  int open(const char* path, int flags, mode_t mode) override { return next(), Syscalls::open(path, flags, mode); }
  int flock(int fd, int operation) override { return next(), Syscalls::flock(fd, operation); }
  int rename(const char* from, const char* to) override {
    next();
    const int result = Syscalls::rename(from, to);
    if (result == 0 && to == directory_.string()) left_ = -1;
    return result;
  }
  int rename_exchange(const char* a, const char* b) override {
    next();
    const int result = can_ ? Syscalls::rename_exchange(a, b) : (errno = EINVAL, -1);
    if (result == 0) left_ = -1;
    return result;
  }
  bool removed = false;

 private:
  void next() {
    if (left_-- != 0) return;
    removed = true;
    fs::remove_all(directory_);
  }
  fs::path directory_;
  bool can_;
  std::atomic<int> left_;
};

TEST_F(Saving, TakesThePlaceOfWhatIsRemovedMeanwhile) {
  const auto path = folder_ / "model";
  for (const bool can_exchange : {true, false}) {
    int at = 0;
    for (bool removed = true; removed; ++at) {
      save_version(1, path);
      Removing machine(path, can_exchange, at);
      machine_.syscalls = &machine;
      version = 2;
      EXPECT_EQ(save_as(path, rows, 1), all(1, kFine)) << at;
      machine_.syscalls = nullptr;
      removed = machine.removed;
      expect_version(2, path);
      EXPECT_EQ(names(), (std::set<std::string>{"model"})) << at;
    }
    EXPECT_GT(at, 10);
  }
}

/// Another save, which publishes just before this one would.
class Publishing : public base::Syscalls {
 public:
  Publishing(fs::path directory, fs::path theirs, bool can_exchange)
      : directory_(std::move(directory)), theirs_(std::move(theirs)), can_(can_exchange) {}
  int rename_exchange(const char* a, const char* b) override {
    return can_ ? Syscalls::rename_exchange(a, b) : (errno = EINVAL, -1);
  }
  int rename(const char* from, const char* to) override {
    if (to == directory_.string() && fs::exists(theirs_)) {
      fs::rename(theirs_, directory_);
      flushed_ = false;
    }
    emptied_early |= !flushed_ && std::string_view(to).ends_with("-spent.tmp");
    return Syscalls::rename(from, to);
  }
  int fsync(int fd) override {
    flushed_ |= fs::read_symlink("/proc/self/fd/" + std::to_string(fd)) == directory_.parent_path();
    return Syscalls::fsync(fd);
  }
  bool emptied_early = false;  ///< the old one, where the other's may not be on the disk

 private:
  fs::path directory_, theirs_;
  bool can_, flushed_ = true;
};

TEST_F(Saving, TakesThePlaceOfWhatAnotherSavePublishesMeanwhile) {
  const auto path = folder_ / "model", theirs = folder_ / "theirs";
  for (const bool can_exchange : {true, false}) {
    for (const bool is_first : {true, false}) {
      if (can_exchange && !is_first) continue;  // there is no instant without a checkpoint
      fs::remove_all(path);
      if (!is_first) {
        save_version(1, path);
        write(path / "config.json", "of a user");
      }
      save_version(3, theirs);
      write(theirs / "theirs.json", "of another user");
      Publishing machine(path, theirs, can_exchange);
      machine_.syscalls = &machine;
      version = 2;
      EXPECT_EQ(save_as(path, rows, 1), all(1, kFine)) << can_exchange << is_first;
      machine_.syscalls = nullptr;
      EXPECT_FALSE(machine.emptied_early);
      expect_version(2, path);
      EXPECT_EQ(names(), (std::set<std::string>{"model"}));
      EXPECT_EQ(bytes_of(path / "theirs.json"), "of another user");
      if (!is_first) {
        EXPECT_EQ(bytes_of(path / "config.json"), "of a user");
      }
    }
  }
}

/// Somebody who works in the directory at the instant of the exchange, before or after it.
class Busy : public base::Syscalls {
 public:
  Busy(fs::path directory, bool can_exchange, bool before)
      : directory_(std::move(directory)), can_(can_exchange), before_(before) {}
  int rename_exchange(const char* a, const char* b) override {
    if (!can_) return (errno = EINVAL, -1);
    if (before_) work(b);
    const int result = Syscalls::rename_exchange(a, b);
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
      machine_.syscalls = &busy;
      save_version(2, path);
      machine_.syscalls = nullptr;
      expect_version(2, path);
      EXPECT_EQ(bytes_of(path / "optimizer.pt"), "appeared");
      EXPECT_EQ(bytes_of(path / "runs" / "new" / "events"), "appeared too");
      EXPECT_EQ(bytes_of(path / "runs" / "old"), "as it was");
      EXPECT_EQ(bytes_of(path / "config.json"), "second");
      EXPECT_EQ(bytes_of(path / "notes"), "renamed");
      EXPECT_EQ(in(path),
                (std::set<std::string>{"model.safetensors", "config.json", "notes", "optimizer.pt", "pipe", "runs"}));
      EXPECT_EQ(names(), (std::set<std::string>{"model"}));
    }
  }
}

TEST_F(Saving, PublishesTextsOfRank0WithTheirDirectory) {
  const auto path = folder_ / "model";
  for (const char* text : {"first", "second"}) {
    version = text[0];
    const std::vector<int> codes = on_ranks(2, [&](Group& group) {
      auto held = hold(rows, group.rank(), 2, true);
      SaveOptions options = kShards;
      if (group.rank() == 0) options.texts["config.json"] = text;
      save(group, views_of(held), path, options);
    });
    ASSERT_EQ(codes, all(2, kFine));
    EXPECT_EQ(bytes_of(path / "config.json"), text);
  }
  for (const std::string name : {"", ".", "..", "../up", "a/b", "model.safetensors", file::kIndexName}) {
    EXPECT_EQ(save_as(path, rows, 2, {.texts = {{name, ""}}}), all(2, static_cast<int>(Code::kInvalidArgument)))
        << name;
  }
  EXPECT_EQ(save_as(folder_ / "one.safetensors", rows, 2, {.texts = {{"a.json", ""}}}),
            all(2, static_cast<int>(Code::kInvalidArgument)));
  EXPECT_EQ(bytes_of(path / "config.json"), "second");
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
  machine_.syscalls = &counting;
  {
    const file::InEnvironment here(&machine_);
    save(*solo(), views_of(held), folder_ / "model", {.max_shard_size = 16});
  }
  machine_.syscalls = nullptr;
  EXPECT_LT(counting.most, 200);
  EXPECT_EQ(in(folder_ / "model").size(), kTensors + 1u);
  for (const int i : {0, 1, 500, kTensors - 1}) {
    Held read("t" + std::to_string(i), DType::kF32, Region::whole({4}));
    load(*solo(), std::span(&read.view, 1),
         folder_ / "model" /
             file::read_index(base::File::open(folder_ / "model" / file::kIndexName)).at(read.view.name));
    EXPECT_EQ(read.memory, held[static_cast<size_t>(i)].memory);
  }
}

}  // namespace
}  // namespace shardow
