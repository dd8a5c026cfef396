// Whatever happens to a path while it is read, all ranks read one version of it; and what one rank reads wrongly is
// noticed.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "file/saving_fixture.h"

namespace shardow {
namespace {

/// Puts another version in place of a path as soon as something of the old one has been read; `times` often.
class Replaced : public base::Syscalls {
 public:
  Replaced(fs::path path, std::vector<fs::path> versions) : path_(std::move(path)), versions_(std::move(versions)) {}
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    const ssize_t done = Syscalls::pread(fd, data, bytes, offset);
    const size_t next = next_++;
    if (next < versions_.size() && fs::is_directory(path_))
      ::syscall(SYS_renameat2, AT_FDCWD, versions_[next].c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE);
    else if (next < versions_.size())
      fs::rename(versions_[next], path_);
    return done;
  }

 private:
  fs::path path_;
  std::vector<fs::path> versions_;
  std::atomic<size_t> next_{0};
};

class Versions : public Saving {
 protected:
  /// What the ranks read are the values of one version; which.
  int loaded_version(const fs::path& path, int ranks, int most) {
    std::vector<std::vector<Held>> loaded(static_cast<size_t>(ranks));
    EXPECT_EQ(on_ranks(ranks,
                       [&](Group& group) {
                         auto& held = loaded[static_cast<size_t>(group.rank())];
                         held = hold(rows, group.rank(), ranks, false);
                         load(group, views_of(held), path);
                       }),
              all(ranks, kFine));
    for (version = 0; version < most; ++version) {
      bool same = true;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto expected = hold(rows, rank, ranks, true);
        for (size_t i = 0; i < expected.size(); ++i)
          same = same && loaded[static_cast<size_t>(rank)][i].memory == expected[i].memory;
      }
      if (same) return version;
    }
    return -1;
  }

  /// Directories of several files: version 0 as "model", and those that are to replace it, which are returned.
  std::vector<fs::path> save_directories(int count) {
    SaveOptions options;
    options.max_shard_size = 1 << 20;
    std::vector<fs::path> newer;
    for (int i = 1; i < count; ++i) save_version(i, newer.emplace_back(folder_ / std::to_string(i)), options);
    save_version(0, folder_ / "model", options);
    return newer;
  }
};

TEST_F(Versions, OfAFileThatIsReplacedMeanwhileAreNotMixed) {
  std::vector<fs::path> newer;
  for (int i = 1; i < 6; ++i) save_version(i, newer.emplace_back(folder_ / (std::to_string(i) + ".safetensors")));
  save_version(0, folder_ / "a.safetensors");
  Replaced disk(folder_ / "a.safetensors", newer);
  machine_ = &disk;
  EXPECT_EQ(loaded_version(folder_ / "a.safetensors", 3, 6), 5);
}

TEST_F(Versions, OfADirectoryThatIsReplacedMeanwhileAreNotMixed) {
  Replaced disk(folder_ / "model", save_directories(4));
  machine_ = &disk;
  EXPECT_EQ(loaded_version(folder_ / "model", 2, 4), 3);
}

TEST_F(Versions, OfADirectoryThatIsReplacedWhileOneRankOpensAndReadsItAreNotMixed) {
  Replaced disk(folder_ / "model", save_directories(12));
  machine_ = &disk;
  const base::CallsTo here(machine_);
  const Checkpoint opened = Checkpoint::open(folder_ / "model");
  auto held = hold(whole, 0, 1, false);
  for (const TensorView& view : views_of(held)) opened.read(view);
  int found = 0;
  for (version = 0; version < 12; ++version) {
    const auto expected = hold(whole, 0, 1, true);
    const auto same = [](const Held& a, const Held& b) { return a.memory == b.memory; };
    found += std::equal(held.begin(), held.end(), expected.begin(), same) ? 1 : 0;
  }
  EXPECT_EQ(found, 1);
}

TEST_F(Versions, ThatWereOpenedStay) {
  save_version(1, folder_ / "new.safetensors");
  save_version(0, folder_ / "a.safetensors");
  auto groups = threads(1);
  const Checkpoint opened = Checkpoint::open(*groups[0], folder_ / "a.safetensors", std::chrono::seconds(10));
  fs::rename(folder_ / "new.safetensors", folder_ / "a.safetensors");
  auto held = hold(whole, 0, 1, false), expected = hold(whole, 0, 1, true);
  load(*groups[0], views_of(held), opened);
  for (size_t i = 0; i < held.size(); ++i) EXPECT_EQ(held[i].memory, expected[i].memory) << held[i].view.name;
}

TEST_F(Versions, ThatAreWrittenOverInPlaceAreNoticed) {
  save_version(0, folder_ / "a.safetensors");
  auto groups = threads(1);
  const Checkpoint opened = Checkpoint::open(*groups[0], folder_ / "a.safetensors", std::chrono::seconds(10));
  fs::last_write_time(folder_ / "a.safetensors", fs::file_time_type::clock::now() + std::chrono::seconds(1));
  auto held = hold(whole, 0, 1, false);
  LoadOptions options;
  options.verify = false;
  try {
    load(*groups[0], views_of(held), opened, options);
    FAIL() << "nothing was noticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kIo);
    EXPECT_EQ(error.os_errno(), ESTALE);
  }
}

thread_local bool misreads = false;

/// Flips a bit of the data that some threads read.
class BadMemory : public base::Syscalls {
 public:
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    const ssize_t done = Syscalls::pread(fd, data, bytes, offset);
    if (misreads && offset >= 4096) static_cast<char*>(data)[done / 2] ^= 4;
    return done;
  }
};

TEST_F(Versions, ThatOneHolderOfAReplicaReadsWronglyAreCorruptOnAll) {
  save_version(0, folder_ / "a.safetensors");
  BadMemory disk;
  machine_ = &disk;
  LoadOptions options;
  options.strict = false;
  for (const int bad : {0, 1, 2}) {
    EXPECT_EQ(on_ranks(3,
                       [&](Group& group) {
                         misreads = group.rank() == bad;
                         Held held("blocks.0.weight", DType::kF32, Region::whole({37, 11}));
                         load(group, std::span(&held.view, 1), folder_ / "a.safetensors", options);
                       }),
              all(3, static_cast<int>(Code::kCorrupt)));
  }
  EXPECT_EQ(load_as(folder_ / "a.safetensors", whole, 3), all(3, kFine));
}

}  // namespace
}  // namespace shardow
