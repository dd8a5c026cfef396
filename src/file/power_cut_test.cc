// Power cuts: whatever a disk forgets of what a save had not flushed, a reader finds the old checkpoint or the new one,
// whole.
#include <fmt/format.h>

#include <cstdlib>

#include "file/catalog.h"
#include "file/checkpoint_fixture.h"
#include "file/disk_model.h"
#include "file/load.h"

namespace shardow {
namespace {

using testing_disk::Call;
using testing_disk::Fate;
using testing_disk::Nodes;
using testing_disk::Recorder;
using testing_disk::Recording;
using versions::version_of;
using versions::Way;
using versions::ways;

class PowerCut : public Checkpoints {
 protected:
  PowerCut() { move_to_memory(); }
  ~PowerCut() override { version = 0; }

  void save_version(int which, const Way& way) {
    version = which;
    const auto codes = on_ranks(2, [&](Group& group) {
      testing_disk::machine = group.rank();
      auto held = versions::values(versions::kSmall, rows, group.rank(), 2);
      versions::save_version(group, held, which, way, folder_ / "live");
    });
    ASSERT_EQ(codes, all(2, kFine));
  }

  /// The calls of a save of version 2 where version 1 is, and a file of somebody else's.
  Recording record(const Way& way) {
    fs::remove_all(folder_ / "live");
    fs::create_directories(folder_ / "live");
    if (!way.first) save_version(1, way);
    if (!way.first && way.directory) std::ofstream(folder_ / "live" / "model" / "config.json") << "mine";
    Recorder recorder(folder_ / "live");
    machine_ = &recorder;
    save_version(2, way);
    machine_ = nullptr;
    return std::move(recorder.recording);
  }

  /// A file that shows a length is whole, also under a temporary name.
  static bool is_whole_or_none(const fs::path& path) {
    const std::string bytes = bytes_of(path);
    if (bytes.size() < 8 || bytes.substr(0, 8) == std::string(8, '\0')) return true;
    try {
      auto group = solo();
      const file::Catalogs catalogs = file::share_catalogs(*group, path, {}, std::chrono::seconds(10));
      std::vector<Held> held;
      for (const file::Stored& one : catalogs.front()->tensors)
        held.emplace_back(one.entry.name, one.entry.dtype, Region::whole(one.entry.shape));
      const auto views = views_of(held);
      file::LoadCall call = file::load_of(views, true);
      call.open = catalogs;
      call.run(*group, {});
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  /// What is wrong with the disk after a power cut; nothing where all is well.
  std::string fault(const Nodes& nodes, const Way& way, bool finished) {
    const fs::path disk = folder_ / "disk";
    fs::remove_all(disk);
    testing_disk::restore(nodes, 0, disk, true);
    const int found = version_of(disk, way);
    if (found != 2 && (finished || found != (way.first ? 0 : 1)))
      return "the reader finds version " + std::to_string(found);
    if (!way.first && way.directory && fs::exists(disk / "model") && bytes_of(disk / "model" / "config.json") != "mine")
      return "config.json has gone";
    if (!way.random_writes) return "";  // headers come first there, and readers go by the file's size and checksums
    for (const auto& entry : fs::recursive_directory_iterator(disk)) {
      const std::string name = entry.path().filename().string();
      if (entry.is_regular_file() && name != "config.json" && name.find(".json") == std::string::npos &&
          !is_whole_or_none(entry.path()))
        return entry.path().string() + " shows a length and is not whole";
    }
    return "";
  }

  /// The first fault of any power cut.
  std::string first_fault(const Recording& recording, const std::vector<Call>& calls, const Way& way, int samples) {
    std::mt19937 random(7);
    for (int sample = 0; sample < samples; ++sample) {
      const Fate fate = sample == 0 ? Fate::kLost : sample == 1 ? Fate::kKept : Fate::kAny;
      for (size_t left = 0; left <= calls.size(); ++left) {
        const size_t count = calls.size() - left;
        const Nodes nodes = testing_disk::after_power_cut(recording.before, calls, count, fate, random);
        const std::string found = fault(nodes, way, count == calls.size());
        if (!found.empty())
          return found + " after " + std::to_string(count) + " calls, sample " + std::to_string(sample);
      }
    }
    return "";
  }
};

TEST_F(PowerCut, LeavesTheOldCheckpointOrTheNewOneWhole) {
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    const Recording recording = record(way);
    EXPECT_GT(recording.calls.size(), 10u);
    EXPECT_EQ(first_fault(recording, recording.calls, way, kAll ? 100 : 3), "");
  }
}

/// Few files are open at a time; each machine flushes what it wrote before it closes one.
TEST_F(PowerCut, FindsWhatAMachineWroteFlushedByItHoweverManyFilesThereAre) {
  std::vector<Spec> specs;
  for (int i = 0; i < 100; ++i) specs.push_back({"t" + std::to_string(i), DType::kF32, {64, 8}});
  fs::create_directories(folder_ / "live");
  Recorder recorder(folder_ / "live");
  machine_ = &recorder;
  const auto codes = on_ranks(2, [&](Group& group) {
    testing_disk::machine = group.rank();
    auto held = hold(rows, group.rank(), 2, true, specs);
    save(group, views_of(held), folder_ / "live" / "model", {.max_shard_size = 2048});
  });
  machine_ = nullptr;
  EXPECT_EQ(codes, all(2, kFine));
  std::set<std::pair<int, int>> written, unflushed;  // (machine, file)
  for (const Call& call : recorder.recording.calls) {
    if (call.kind == Call::Kind::kWrite)
      written.emplace(call.machine, call.node), unflushed.emplace(call.machine, call.node);
    if (call.kind == Call::Kind::kFlush) unflushed.erase({call.machine, call.node});
  }
  EXPECT_GT(written.size(), 100u);
  EXPECT_EQ(unflushed.size(), 0u);
}

/// From the commit on, the disk is dead, or its next flush fails.
class Failing : public Recorder {
 public:
  enum class How { kNever, kDies, kFlushFails };
  Failing(const fs::path& folder, How how) : Recorder(folder), how_(how) {}
  void heal() { how_ = How::kNever; }

  int rename(const char* from, const char* to) override {
    if (dead()) return fails();
    const int result = Recorder::rename(from, to);
    reached_ = reached_ || (result == 0 && commits(to));
    return result;
  }
  int unlink(const char* path) override { return dead() ? fails() : Recorder::unlink(path); }
  int rmdir(const char* path) override { return dead() ? fails() : Recorder::rmdir(path); }
  int fsync(int fd) override {
    if (how_ == How::kNever || !reached_) return Recorder::fsync(fd);
    if (how_ == How::kFlushFails) heal();
    return fails();
  }

 private:
  bool dead() const { return how_ == How::kDies && reached_; }
  static bool commits(const fs::path& to) {
    return to.filename() == file::kIndexName || to.filename() == file::kAveragesName ||
           to.filename() == file::kSingleName;
  }
  static int fails() { return (errno = EIO, -1); }

  How how_;
  bool reached_ = false;
};

/// What was done to names may be lost when what was done to files is not: so a directory is taken apart only when it is
/// settled on the disk that it is not the checkpoint.
TEST_F(PowerCut, LeavesOneAlsoWhereTheSaveBeforeFailedOrItsEndWasNotFlushed) {
  for (const Way& way : ways()) {
    const bool plain = way.names.empty() && way.random_writes;
    if (!way.directory || way.first || (!kAll && !plain)) continue;
    for (const auto how : {Failing::How::kNever, Failing::How::kDies, Failing::How::kFlushFails}) {
      SCOPED_TRACE(fmt::format("{}, {}", way.name, static_cast<int>(how)));
      fs::remove_all(folder_ / "live");
      fs::create_directories(folder_ / "live");
      save_version(1, way);
      std::ofstream(folder_ / "live" / "model" / "config.json") << "mine";
      Failing disk(folder_ / "live", how);
      machine_ = &disk;
      if (how == Failing::How::kNever) {
        save_version(1, way);
      } else {
        version = 2;
        EXPECT_NE(on_ranks(2,
                           [&](Group& group) {
                             testing_disk::machine = group.rank();
                             auto held = versions::values(versions::kSmall, rows, group.rank(), 2);
                             versions::save_version(group, held, 2, way, folder_ / "live");
                           }),
                  all(2, kFine));
      }
      disk.heal();
      save_version(2, way);
      machine_ = nullptr;
      EXPECT_EQ(first_fault(disk.recording, disk.recording.calls, way, kAll ? 100 : 3), "");
    }
  }
}

/// Which of the flushes of a save a call is. kName: of the name of a directory that was there, which here is on the
/// disk already; simulated runs have others.
enum class Flush { kData, kHeader, kLength, kDraft, kParent, kName };

std::vector<Flush> flushes_of(const Recording& recording, const std::vector<size_t>& which) {
  std::map<int, int> left;
  for (const size_t i : which) left[recording.calls[i].node] += recording.calls[i].machine == 0 ? 1 : 0;
  const bool in_place = recording.calls[which.back()].node != 0;  // the last flush is of the directory itself then
  std::vector<Flush> flushes;
  for (const size_t i : which) {
    const Call& call = recording.calls[i];
    const std::string& path = recording.paths.at(call.node);
    const int after = call.machine == 0 ? --left[call.node] : 2;
    flushes.push_back(call.node == 0 && in_place                          ? Flush::kName
                      : call.node == 0 || (in_place && i == which.back()) ? Flush::kParent
                      : !path.ends_with(".safetensors") && path.find(".safetensors.") == std::string::npos
                          ? Flush::kDraft
                      : after == 0 ? Flush::kLength
                      : after == 1 ? Flush::kHeader
                                   : Flush::kData);
  }
  return flushes;
}

TEST_F(PowerCut, IsNoticedToDoHarmWhereASaveLeavesOutAFlush) {
  for (const Way& way : ways()) {
    if (!way.random_writes || way.first || (!kAll && !way.names.empty())) continue;
    const Recording recording = record(way);
    std::vector<size_t> which;
    for (size_t i = 0; i < recording.calls.size(); ++i) {
      if (recording.calls[i].kind == Call::Kind::kFlush) which.push_back(i);
    }
    const std::vector<Flush> flushes = flushes_of(recording, which);
    for (const Flush left_out : {Flush::kData, Flush::kHeader, Flush::kLength, Flush::kDraft, Flush::kParent}) {
      if (left_out == Flush::kDraft && !way.directory) continue;
      SCOPED_TRACE(std::string(way.name) + ", flush " + std::to_string(static_cast<int>(left_out)));
      std::vector<Call> calls;
      for (size_t i = 0; i < recording.calls.size(); ++i) {
        const auto at = std::find(which.begin(), which.end(), i);
        if (at == which.end() || flushes[static_cast<size_t>(at - which.begin())] != left_out)
          calls.push_back(recording.calls[i]);
      }
      EXPECT_LT(calls.size(), recording.calls.size());
      EXPECT_NE(first_fault(recording, calls, way, 60), "");
    }
  }
}

}  // namespace
}  // namespace shardow
