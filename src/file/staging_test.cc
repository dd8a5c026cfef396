// A save changes its own files and nothing else: what it replaces, and what it leaves alone.
#include "file/staging.h"

#include <fmt/format.h>
#include <simdjson.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "file/disk_model.h"
#include "file/index.h"
#include "file/saving_fixture.h"

namespace shardow {
namespace {

TEST_F(Saving, ReplacesWhatTheOldIndexNamesAndNothingElse) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  const std::set<std::string> others = {"model-ema.safetensors",
                                        "model-00001.safetensors",
                                        "model-1-of-2.safetensors",
                                        "ema-0.9.safetensors",
                                        "model-abc-00001-of-00002.safetensors",
                                        "model-00007-of-00009.safetensors",
                                        "model-0123456789abcdef.safetensors",
                                        "weights.safetensors.bak"};
  for (const std::string& name : others) write(path / name, "of a user: " + name);
  write(path / file::name_with_nonce("model.safetensors", kNonce, 6, 9), "of a save that did not commit");
  for (const auto& options : {SaveOptions(), kShards, kShards, SaveOptions()}) {
    save_version(version + 1, path, options);
    expect_version(version, path);
    EXPECT_EQ(versions::strays(path, others), "");
    for (const std::string& name : others) EXPECT_EQ(bytes_of(path / name), "of a user: " + name);
  }
  std::set<std::string> expected = others;
  expected.insert("model.safetensors");
  EXPECT_EQ(in(path), expected);
}

TEST_F(Saving, IntoADirectoryWithoutACheckpointTakesPlainNamesThatAreFree) {
  const auto path = folder_ / "model";
  fs::create_directory(path);
  write(path / "model-00001-of-00003.safetensors", "of a user");
  save_version(1, path, kShards);
  expect_version(1, path);
  EXPECT_EQ(bytes_of(path / "model-00001-of-00003.safetensors"), "of a user");
  EXPECT_TRUE(fs::exists(path / "model-00002-of-00003.safetensors"));
  EXPECT_EQ(versions::strays(path, {"model-00001-of-00003.safetensors"}), "");
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
  EXPECT_EQ(versions::strays(path, {}), "");
  EXPECT_EQ(in(path).size(), 4u);  // with the list of averages
}

/// One that an earlier version wrote has no list.
TEST_F(Saving, OfNamedFilesReplacesThoseOfADirectoryWithoutAList) {
  const auto path = folder_ / "model";
  version = 1;
  ASSERT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, kFine));
  fs::remove(path / file::kAveragesName);
  expect_version(1, path / "ema-0.99.safetensors");
  version = 2;
  ASSERT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, kFine));
  expect_version(2, path / "ema-0.9.safetensors");
  expect_version(2, path / "ema-0.99.safetensors");
  EXPECT_EQ(versions::strays(path, {}), "");
}

/// Where the kernel refuses links to others' files, a copy would be ours, and what its owner goes on writing lost.
TEST_F(Saving, LeavesOthersFilesWhereTheyAre) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  write(path / "log", "their first line");
  std::ofstream theirs(path / "log", std::ios::app);
  struct stat before {
  }, after{};
  ASSERT_EQ(::stat((path / "log").c_str(), &before), 0);
  class Refusing : public base::Syscalls {
    int link(const char*, const char*) override { return (errno = EPERM, -1); }
  } machine;
  machine_ = &machine;
  save_version(2, path, kShards);
  machine_ = nullptr;
  ASSERT_EQ(::stat((path / "log").c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino);
  theirs << ", and their second" << std::flush;
  EXPECT_EQ(bytes_of(path / "log"), "their first line, and their second");
}

/// A volume may be mounted there.
class Below : public base::Syscalls {
 public:
  explicit Below(fs::path path) : path_(path.string()) {}
  int open(const char* path, int flags, mode_t mode) override { return look(path), Syscalls::open(path, flags, mode); }
  int rename(const char* from, const char* to) override { return look(from), look(to), Syscalls::rename(from, to); }
  int unlink(const char* path) override { return look(path), Syscalls::unlink(path); }
  int rmdir(const char* path) override { return look(path), Syscalls::rmdir(path); }
  int mkdir(const char* path, mode_t mode) override { return look(path), Syscalls::mkdir(path, mode); }
  int link(const char* from, const char* to) override { return look(from), look(to), Syscalls::link(from, to); }
  int list(const char* path, std::vector<std::string>* names) override {
    return look(path), Syscalls::list(path, names);
  }
  std::atomic<int> touched = 0;

 private:
  void look(const std::string& path) { touched += path.starts_with(path_); }
  const std::string path_;
};

TEST_F(Saving, TouchesNothingInDirectoriesBelowItsOwn) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  fs::create_directory(path / "volume");
  write(path / "volume" / "data", "on another disk");
  Below machine(path / "volume");
  machine_ = &machine;
  save_version(2, path, kShards);
  save_version(3, path);
  machine_ = nullptr;
  EXPECT_EQ(machine.touched, 0);
  EXPECT_EQ(bytes_of(path / "volume" / "data"), "on another disk");
}

TEST_F(Saving, KeepsItsDirectoryWithItsModeForWhoStandsInIt) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  ASSERT_EQ(::chmod(path.c_str(), 02770), 0);
  struct stat before {
  }, after{};
  ASSERT_EQ(::stat(path.c_str(), &before), 0);
  const fs::path home = fs::current_path();
  fs::current_path(path);
  save_version(2, path, kShards);
  std::error_code error;
  EXPECT_EQ(fs::current_path(error), fs::canonical(path)) << error.message();
  fs::current_path(home);
  ASSERT_EQ(::stat(path.c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino);
  EXPECT_EQ(before.st_mode, after.st_mode);
  EXPECT_EQ(before.st_gid, after.st_gid);
}

/// Whose rename number `fatal` fails.
class FailingRename : public base::Syscalls {
 public:
  explicit FailingRename(int fatal) : left_(fatal) {}
  int rename(const char* from, const char* to) override {
    return left_-- == 0 ? (errno = EIO, -1) : Syscalls::rename(from, to);
  }
  bool failed() const { return left_ < 0; }

 private:
  int left_;
};

TEST_F(Saving, LeavesWhatWasThereWhereARenameFails) {
  const auto path = folder_ / "model";
  for (const auto& [before, after] :
       {std::pair(kShards, kShards), {SaveOptions(), kShards}, {kShards, SaveOptions()}}) {
    for (int fatal = 0;; ++fatal) {
      fs::remove_all(path);
      save_version(1, path, before);
      write(path / "config.json", "mine");
      const std::set<std::string> there = in(path);
      FailingRename machine(fatal);
      machine_ = &machine;
      version = 2;
      const std::vector<int> codes = save_as(path, rows, 2, after);
      machine_ = nullptr;
      if (!machine.failed()) break;
      EXPECT_EQ(codes, all(2, static_cast<int>(Code::kIo))) << fatal;
      expect_version(1, path);
      EXPECT_EQ(in(path), there) << fatal;
      EXPECT_EQ(names(), (std::set<std::string>{"model"})) << fatal;
    }
    expect_version(2, path);
  }
}

/// Storage of a network may do a rename, and answer that it failed.
TEST_F(Saving, IsTheNewOneWholeWhereItsLastRenameIsDoneAndAnsweredWithAnError) {
  class Late : public base::Syscalls {
   public:
    int rename(const char* from, const char* to) override {
      const int result = Syscalls::rename(from, to);
      return fs::path(to).filename() == file::kIndexName ? (errno = EIO, -1) : result;
    }
  } machine;
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  fail_to_save_version(2, path, machine);
  expect_version(2, path);
  save_version(3, path, kShards);
  expect_version(3, path);
  EXPECT_EQ(versions::strays(path, {}), "");
}

/// A list names what its save replaces, so that the next one removes it; a file that was put there since is a user's.
TEST_F(Saving, LeavesAFileThatWasPutInThePlaceOfAReplacedOne) {
  class Keeping : public base::Syscalls {
    int unlink(const char* path) override {
      return fs::path(path).extension() == ".safetensors" ? (errno = EIO, -1) : Syscalls::unlink(path);
    }
  } machine;
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  const std::set<std::string> old = in(path);
  machine_ = &machine;
  save_version(2, path, kShards);
  machine_ = nullptr;
  const std::string name =
      *std::find_if(old.begin(), old.end(), [](const auto& name) { return name.ends_with(".safetensors"); });
  ASSERT_TRUE(fs::exists(path / name));
  fs::remove(path / name);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // coarser clocks of file systems
  write(path / name, "of a user");
  save_version(3, path, kShards);
  EXPECT_EQ(bytes_of(path / name), "of a user");
  EXPECT_EQ(versions::strays(path, {name}), "");
}

TEST_F(Saving, RemovesNothingWhereAListThatMayNameItCannotBeRead) {
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  const std::string named = file::name_with_nonce("ema-0.9.safetensors", kNonce, 0, 1);
  write(path / named, "of averages");
  write(path / file::kAveragesName, "{");
  save_version(2, path, kShards);
  expect_version(2, path);
  EXPECT_EQ(bytes_of(path / named), "of averages");
}

TEST_F(Saving, BeginsOnlyWhereThereIsRoomForAllOfIt) {
  class Small : public base::Syscalls {
   public:
    int statfs(const char* path, struct statfs* out) override {
      const int result = Syscalls::statfs(path, out);
      out->f_bsize = out->f_frsize = 1;
      out->f_bavail = static_cast<decltype(out->f_bavail)>(room);
      return result;
    }
    int64_t room = 0;
  } machine;
  const auto path = folder_ / "a.safetensors";
  save_version(1, path);
  machine.room = static_cast<int64_t>(fs::file_size(path));
  machine_ = &machine;
  save_version(2, path);
  --machine.room;
  version = 3;
  EXPECT_EQ(save_as(path, rows, 2), all(2, static_cast<int>(Code::kOutOfSpace)));
  machine_ = nullptr;
  expect_version(2, path);
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors"}));
}

class NoRename : public base::Syscalls {
 public:
  int rename(const char*, const char*) override { return (errno = ENOSYS, -1); }
};

TEST_F(Saving, OfNamedFilesGoesToStorageThatRenamesNothing) {
  NoRename storage;
  const auto path = folder_ / "model";
  for (const int which : {1, 2, 3}) {
    machine_ = &storage;
    version = which;
    ASSERT_EQ(save_named({"ema-0.9.safetensors", "ema-0.99.safetensors"}), all(2, kFine));
    machine_ = nullptr;
    expect_version(which, path / "ema-0.9.safetensors");
    expect_version(which, path / "ema-0.99.safetensors");
    EXPECT_EQ(versions::strays(path, {}), "");
  }
  machine_ = &storage;
  version = 4;
  EXPECT_EQ(save_named({"one.safetensors"}), all(2, kFine));
  EXPECT_EQ(save_named({"one.safetensors"}), all(2, static_cast<int>(Code::kUnsupported)));
  machine_ = nullptr;
  EXPECT_EQ(names(), (std::set<std::string>{"model"}));
}

/// Without renames the list is the commit, and whether a reader finds it is open from its first byte on.
TEST_F(Saving, KeepsWhatAListNamesThatCouldNotBeFlushed) {
  class Unflushed : public NoRename {
   public:
    int open(const char* path, int flags, mode_t mode) override {
      const int fd = NoRename::open(path, flags, mode);
      if ((flags & O_CREAT) != 0 && fs::path(path).filename() == file::kIndexName) list_ = fd;
      return fd;
    }
    int fsync(int fd) override { return fd == list_ ? (errno = EIO, -1) : NoRename::fsync(fd); }

   private:
    std::atomic<int> list_ = -1;
  } machine;
  const auto path = folder_ / "model";
  save_version(1, path, kShards);
  fail_to_save_version(2, path, machine);
  expect_version(2, path);
}

TEST_F(Saving, CutsLongNamesBetweenCharacters) {
  for (int more = 0; more < 4; ++more) {
    std::string name(static_cast<size_t>(more), 'n');
    while (name.size() + 2 <= 255) name += "\u00fc";
    const std::string temporary = file::temporary_path(folder_ / name, kNonce).filename().string();
    EXPECT_LE(temporary.size(), 255u);
    EXPECT_TRUE(simdjson::validate_utf8(temporary)) << temporary;
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
  for (const std::string name :
       {"", ".", "..", "../up", "a/b", "model.safetensors", file::kIndexName, file::kAveragesName}) {
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
  move_to_memory();
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
  machine_ = &counting;
  {
    const base::CallsTo here(machine_);
    save(*solo(), views_of(held), folder_ / "model", {.max_shard_size = 16});
  }
  machine_ = nullptr;
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
