// One save at a time on a path: whom it waits for, and what it clears away after a dead one.
#include "file/claim.h"

#include <atomic>
#include <cerrno>

#include "file/saving_fixture.h"

namespace shardow {
namespace {

TEST_F(Saving, ClearsAwayWhatDeadSavesLeftAndNothingElse) {
  const std::string nonce = kNonce;
  fs::create_directories(folder_ / (".a.safetensors." + nonce + ".tmp"));
  write(folder_ / (".a.safetensors." + nonce + "-renamed.tmp"), "half");
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
  const auto path = folder_ / "a.safetensors";
  save_version(1, path);
  const auto draft = file::temporary_path(path, kNonce, file::Temporary::kDraft);
  write(draft, "of a save that goes on");
  {
    base::FileLock living;
    ASSERT_EQ(living.take(draft), base::FileLock::Result::kHeld);
    version = 2;
    EXPECT_EQ(save_as(path, rows, 2, {.timeout = std::chrono::milliseconds(400)}),
              all(2, static_cast<int>(Code::kTimeout)));
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

/// Gives a living save's draft another name just before it is asked whether it lives, once, as its save does to see
/// whether it can.
class Renaming : public base::Syscalls {
 public:
  explicit Renaming(const fs::path& path)
      : from_(file::temporary_path(path, kNonce, file::Temporary::kRenamed)),
        to_(file::temporary_path(path, kNonce, file::Temporary::kDraft)) {}
  int open(const char* path, int flags, mode_t mode) override {
    if (path == from_ && fs::exists(from_)) fs::rename(from_, to_);
    return Syscalls::open(path, flags, mode);
  }

 private:
  const fs::path from_, to_;
};

TEST_F(Saving, WaitsForALivingSaveWhoseDraftIsRenamedWhileItLooks) {
  const auto path = folder_ / "a.safetensors";
  save_version(1, path);
  const auto draft = file::temporary_path(path, kNonce, file::Temporary::kRenamed);
  write(draft, "of a save that goes on");
  base::FileLock living;
  ASSERT_EQ(living.take(draft), base::FileLock::Result::kHeld);
  Renaming machine(path);
  machine_.syscalls = &machine;
  version = 2;
  EXPECT_EQ(save_as(path, rows, 2, {.timeout = std::chrono::milliseconds(100)}),
            all(2, static_cast<int>(Code::kTimeout)));
  machine_.syscalls = nullptr;
  expect_version(1, path);
}

/// Whether somebody could look for living saves while a draft has another name, and miss it.
class Looking : public base::Syscalls {
 public:
  int rename(const char* from, const char* to) override {
    const bool renamed =
        std::string_view(to).ends_with("-renamed.tmp") || std::string_view(from).ends_with("-renamed.tmp");
    if (renamed) ++asked;
    if (renamed && base::FileLock().take(fs::path(from).parent_path()) != base::FileLock::Result::kOthers) ++free;
    return Syscalls::rename(from, to);
  }
  std::atomic<int> asked = 0, free = 0;
};

TEST_F(Saving, RenamesItsDraftWhileNobodyElseLooksForLivingOnes) {
  for (const char* const name : {"a.safetensors", "model"}) {
    Looking machine;
    machine_.syscalls = &machine;
    save_version(1, folder_ / name);
    machine_.syscalls = nullptr;
    EXPECT_EQ(machine.asked, 2);
    EXPECT_EQ(machine.free, 0);
  }
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
  const auto gone = folder_ / "gone", replaced = folder_ / "replaced", living = folder_ / "living",
             removed = folder_ / "removed";
  for (const auto& target : {gone, living})
    fs::create_directory(file::temporary_path(target, kNonce, file::Temporary::kDraft));
  fs::create_directory(file::temporary_path(replaced, kNonce, file::Temporary::kOld));
  write(file::temporary_path(replaced, kNonce, file::Temporary::kOld) / "model.safetensors", "the old one");
  fs::create_directory(file::temporary_path(removed, kNonce, file::Temporary::kSpent));
  write(file::temporary_path(removed, kNonce, file::Temporary::kSpent) / "model.safetensors",
        "half of what was replaced");
  base::FileLock lock;
  ASSERT_EQ(lock.take(file::temporary_path(living, kNonce, file::Temporary::kDraft)), base::FileLock::Result::kHeld);
  for (const auto& target : {gone, replaced, removed, living, folder_ / "none" / "at all"}) file::clear_dead(target);
  EXPECT_EQ(names(),
            (std::set<std::string>{"replaced",
                                   file::temporary_path(living, kNonce, file::Temporary::kDraft).filename().string()}));
  EXPECT_EQ(bytes_of(replaced / "model.safetensors"), "the old one");
}

/// Leaves the question whether a draft lives without an answer, once.
class FailingFlock : public base::Syscalls {
 public:
  int open(const char* path, int flags, mode_t mode) override {
    const int fd = Syscalls::open(path, flags, mode);
    if (std::string_view(path).ends_with(std::string(kNonce) + ".tmp") && left_ > 0) draft_ = fd;
    return fd;
  }
  int flock(int fd, int operation) override {
    return fd == draft_ && left_-- > 0 ? (draft_ = -1, errno = EIO, -1) : Syscalls::flock(fd, operation);
  }

 private:
  int draft_ = -1, left_ = 1;
};

TEST_F(Saving, WhatALivingSaveMovesCheckpointsToStaysWithItsDraft) {
  const auto path = folder_ / "model";
  save_version(1, path);
  const auto draft = file::temporary_path(path, kNonce, file::Temporary::kDraft);
  const auto old = file::temporary_path(path, kNonce, file::Temporary::kOld);
  for (const auto& directory : {draft, old}) fs::create_directory(directory);
  write(old / "model.safetensors", "");
  base::FileLock lock;
  ASSERT_EQ(lock.take(draft), base::FileLock::Result::kHeld);
  FailingFlock machine;
  machine_.syscalls = &machine;
  save_version(2, path);
  machine_.syscalls = nullptr;
  expect_version(2, path);
  EXPECT_EQ(names(), (std::set<std::string>{"model", draft.filename().string(), old.filename().string()}));
  EXPECT_TRUE(fs::exists(old / "model.safetensors"));
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
  machine_.syscalls = &network;
  save_version(1, path);
  machine_.syscalls = nullptr;
  EXPECT_EQ(names(), (std::set<std::string>{"a.safetensors", young.filename().string()}));
}

}  // namespace
}  // namespace shardow
