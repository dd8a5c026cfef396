// One save at a time on a path: whom it waits for, and what it clears away after a dead one.
#include "file/path_lock.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <map>

#include "file/names.h"
#include "file/saving_fixture.h"
#include "file/staging.h"

namespace shardow {
namespace {

/// That a process holds which lives.
class Lock {
 public:
  explicit Lock(const fs::path& target) {
    std::ofstream(file::lock_path(target)) << "";
    EXPECT_EQ(lock_.take(file::lock_path(target)), base::FileLock::Result::kHeld);
  }
  void release() { lock_.release(); }

 private:
  base::FileLock lock_;
};

TEST_F(Saving, ClearsAwayWhatDeadSavesLeftAndNothingElse) {
  const std::string nonce = kNonce;
  fs::create_directories(folder_ / (".a.safetensors." + nonce + ".tmp"));
  write(folder_ / (".a.safetensors." + nonce + ".tmp") / "model.safetensors", "half");
  write(folder_ / ".a.safetensors.00000000aaaaaaaa.tmp", "half");
  write(file::lock_path(folder_ / "a.safetensors"), "");
  const std::set<std::string> others = {".another.safetensors." + nonce + ".tmp", ".a." + nonce + ".tmp",
                                        ".a.safetensors.4567.tmp", ".a.safetensors.notes.tmp",
                                        ".a.safetensors." + nonce + ".tmp.bak"};
  for (const std::string& name : others) write(folder_ / name, "somebody else's");
  save_version(1, folder_ / "a.safetensors");
  std::set<std::string> expected = others;
  expected.insert("a.safetensors");
  EXPECT_EQ(names(), expected);
}

TEST_F(Saving, WaitsForALivingSaveToTheSamePathAndSaysSoWhereThatDoesNotEnd) {
  for (const char* const name : {"a.safetensors", "model"}) {
    const auto path = folder_ / name;
    save_version(1, path);
    Lock living(path);
    version = 2;
    EXPECT_EQ(save_as(path, rows, 2, {.timeout = std::chrono::milliseconds(400)}),
              all(2, static_cast<int>(Code::kTimeout)));
    expect_version(1, path);
    save_version(3, folder_ / "b.safetensors");  // another name beside it does not wait
    std::thread ends([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      living.release();
    });
    save_version(4, path);
    ends.join();
    expect_version(4, path);
  }
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", "b.safetensors", "model"}));
}

/// A holder removes the file and ends its lock after another save has opened that file, and before it asks for its
/// lock.
TEST_F(Saving, TakesNoLockThatItsHolderHasRemoved) {
  class Between : public base::Syscalls {
   public:
    Between(Lock& holder, fs::path path) : holder_(holder), path_(std::move(path)) {}
    int flock(int fd, int operation) override {
      if (!std::exchange(came_, true)) {
        fs::remove(path_);
        holder_.release();
      }
      return Syscalls::flock(fd, operation);
    }

   private:
    Lock& holder_;
    const fs::path path_;
    bool came_ = false;
  };
  Lock holder(folder_ / "model");
  Between machine(holder, file::lock_path(folder_ / "model"));
  machine_ = &machine;
  const base::CallsTo here(machine_);
  const file::PathLock lock(folder_ / "model", base::after(std::chrono::seconds(10)));
  base::FileLock another;
  EXPECT_EQ(another.take(file::lock_path(folder_ / "model")), base::FileLock::Result::kOthers);
}

/// A lock belongs to the open file, which a child that is forked meanwhile (a data loader's) has as well.
TEST_F(Saving, EndsItsLockThoughAChildThatWasForkedMeanwhileLives) {
  Lock lock(folder_ / "model");
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  ASSERT_GT(child, 0);
  lock.release();
  base::FileLock next;
  EXPECT_EQ(next.take(file::lock_path(folder_ / "model")), base::FileLock::Result::kHeld);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

/// Whoever saves into a directory, and whoever saves one file of it, leave each other's temporary files alone.
TEST_F(Saving, LeavesTemporaryFilesOfOtherLivingSavesInItsDirectoryAlone) {
  const auto path = folder_ / "model", file = path / "b.safetensors";
  save_version(1, path, kShards);
  const auto theirs = file::temporary_path(file, kNonce);
  write(theirs, "of a save that goes on");
  {
    Lock living(file);
    save_version(2, path, kShards);
    EXPECT_EQ(bytes_of(theirs), "of a save that goes on");
  }
  save_version(3, path, kShards);
  EXPECT_FALSE(fs::exists(theirs));
  write(theirs, "of a save into the directory");
  {
    Lock living(path);
    save_version(1, file);
    EXPECT_EQ(bytes_of(theirs), "of a save into the directory");
  }
  save_version(2, file);
  EXPECT_FALSE(fs::exists(theirs));
}

TEST_F(Saving, WhatStandsAtALocksPlaceAndIsNoLockIsNamedAndStays) {
  const auto path = folder_ / "a.safetensors", lock = file::lock_path(path);
  save_version(1, path);
  fs::create_directory(folder_ / "theirs");
  const std::map<const char*, std::function<void()>> kinds = {
      {"a FIFO", [&] { EXPECT_EQ(::mkfifo(lock.c_str(), 0666), 0); }},
      {"a link to itself", [&] { fs::create_symlink(lock, lock); }},
      {"a link to a file", [&] { fs::create_symlink(path, lock); }},
      {"a link to nothing", [&] { fs::create_symlink("nothing", lock); }},
      {"a text", [&] { write(lock, "another program's"); }},
      {"a directory", [&] { fs::create_directory(lock), write(lock / "text", "another program's"); }},
  };
  for (const auto& [kind, make] : kinds) {
    SCOPED_TRACE(kind);
    make();
    const auto before = fs::symlink_status(lock).type();
    EXPECT_EQ(save_as(path, rows, 2), all(2, static_cast<int>(Code::kIo)));
    try {
      const file::PathLock none(path, {});
      ADD_FAILURE() << "PathLock took it";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(lock.string()), std::string::npos) << error.what();
    }
    file::clear_dead(path);
    EXPECT_EQ(fs::symlink_status(lock).type(), before);
    if (before == fs::file_type::directory) {
      EXPECT_EQ(bytes_of(lock / "text"), "another program's");
    }
    if (before == fs::file_type::regular) {
      EXPECT_EQ(bytes_of(lock), "another program's");
    }
    expect_version(1, path);
    save_version(1, folder_ / "b.safetensors");
    fs::remove_all(lock);
  }
}

/// A lock of a user's directory slows every save down for whoever has one for reasons of their own.
TEST_F(Saving, NeverLocksADirectory) {
  class Looking : public base::Syscalls {
   public:
    int flock(int fd, int operation) override {
      struct stat found {};
      ::fstat(fd, &found);
      directories += S_ISDIR(found.st_mode);
      ++locks;
      return Syscalls::flock(fd, operation);
    }
    std::atomic<int> locks = 0, directories = 0;
  } machine;
  machine_ = &machine;
  for (const char* const name : {"a.safetensors", "model", "model"})
    save_version(1, folder_ / name,
                 kShards.max_shard_size > 0 && name == std::string("model") ? kShards : SaveOptions());
  machine_ = nullptr;
  EXPECT_GT(machine.locks, 0);
  EXPECT_EQ(machine.directories, 0);
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

TEST_F(Saving, WhatDeadSavesLeftIsClearedAwayWithoutASaveAndWhatLivingOnesMakeIsNot) {
  const auto gone = folder_ / "gone", living = folder_ / "living", there = folder_ / "there";
  for (const auto& target : {gone, living}) fs::create_directory(file::temporary_path(target, kNonce));
  save_version(1, there, kShards);
  write(file::temporary_path(there / "model-00001-of-00002.safetensors", kNonce), "half");
  write(there / file::name_with_nonce("model.safetensors", kNonce, 0, 2), "of a save that did not commit");
  const std::set<std::string> before = in(there);
  Lock lock(living);
  for (const auto& target : {gone, living, there, folder_ / "none" / "at all"}) file::clear_dead(target);
  EXPECT_EQ(names(), (std::set<std::string>{"there", file::temporary_path(living, kNonce).filename().string(),
                                            file::lock_path(living).filename().string()}));
  EXPECT_EQ(in(there).size() + 2, before.size());
  expect_version(1, there);
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
  const auto young = file::temporary_path(path, kNonce), aged = file::temporary_path(path, "00000000aaaaaaaa");
  write(young, "another machine's");
  write(aged, "a dead one's");
  fs::last_write_time(aged, fs::file_time_type::clock::now() - std::chrono::hours(2));
  Network network;
  machine_ = &network;
  save_version(1, path);
  machine_ = nullptr;
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", young.filename().string()}));
}

}  // namespace
}  // namespace shardow
