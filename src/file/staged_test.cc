// A save in steps: what each of them may be followed by, what is there when it is not, and what a process holds after a
// thousand of them.
#include <atomic>
#include <filesystem>
#include <future>
#include <iterator>

#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

const Spec kSpec = {"w", DType::kF32, {40, 25}};

/// One rank's rows.
struct Rows : Held {
  explicit Rows(Group& group) : Held(kSpec.name, kSpec.dtype, rows(kSpec.shape, group.rank(), group.size())) {}
  void become(float value) {
    for (size_t at = 0; at < memory.size(); at += sizeof value) std::memcpy(memory.data() + at, &value, sizeof value);
  }
  std::vector<TensorView> views() const { return {view}; }
};

class Staged : public Checkpoints {
 protected:
  /// All elements are `value`.
  void expect(float value, const fs::path& path) {
    Rows read(*solo());
    load(*solo(), read.views(), path);
    Rows expected(*solo());
    expected.become(value);
    EXPECT_EQ(read.memory, expected.memory);
  }
};

Code code_of(const std::function<void()>& call, std::string* message = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (message != nullptr) *message = error.what();
    return error.code();
  }
  return Code::kInternal;
}

TEST_F(Staged, OfPlainTensorsIsWhatSaveWrites) {
  for (const char* const name : {"a.safetensors", "model"}) {
    std::atomic<int64_t> staged_bytes{0}, written{0};
    EXPECT_EQ(on_ranks(3,
                       [&](Group& group) {
                         Rows mine(group);
                         mine.become(1);
                         save(group, mine.views(), folder_ / "straight" / name);
                         StagedSave staged(group, mine.views(), folder_ / "staged" / name);  // views are copied
                         std::vector<std::byte> memory(staged.staging_bytes());
                         staged.stage(memory);
                         mine.become(2);
                         staged_bytes += static_cast<int64_t>(memory.size());
                         written += staged.write().bytes_written;
                       }),
              all(3, kFine));
    EXPECT_EQ(staged_bytes, 4000);
    EXPECT_EQ(written, 4000) << "short runs are put together by one of the ranks";
  }
  for (const char* const file : {"a.safetensors", "model/model.safetensors"})
    EXPECT_TRUE(bytes_of(folder_ / "staged" / file) == bytes_of(folder_ / "straight" / file)) << file;
}

TEST_F(Staged, WithoutWriteNothingTouchesTheDisk) {
  for (const char* const name : {"a.safetensors", "model"}) {
    EXPECT_EQ(on_ranks(2,
                       [&](Group& group) {
                         Rows mine(group);
                         StagedSave staged(group, mine.views(), folder_ / name);
                         std::vector<std::byte> memory(staged.staging_bytes());
                         if (group.rank() == 0) staged.stage(memory);  // local
                       }),
              all(2, kFine));
  }
  EXPECT_EQ(names(), std::set<std::string>());
}

TEST_F(Staged, StepsOutOfOrderAreRefusedAndTheSaveIsWhatItWas) {
  const auto path = folder_ / "a.safetensors";
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       Rows mine(group);
                       mine.become(3);
                       StagedSave staged(group, mine.views(), path);
                       std::vector<std::byte> memory(staged.staging_bytes());
                       std::string told;
                       EXPECT_EQ(code_of(
                                     [&] {
                                       staged.stage({memory.data(), memory.size() - 1});
                                     },
                                     &told),
                                 Code::kInvalidArgument);
                       EXPECT_EQ(told, path.string() + ": 1999 bytes of staging memory; 2000 are needed");
                       staged.stage(memory);
                       mine.become(4);
                       EXPECT_EQ(code_of([&] { staged.stage(memory); }, &told), Code::kInvalidArgument);
                       EXPECT_EQ(told, path.string() + ": stage() comes once, before write()");
                       staged.write();
                       EXPECT_EQ(code_of([&] { staged.stage(memory); }), Code::kInvalidArgument);
                       EXPECT_EQ(code_of([&] { staged.write(); }, &told), Code::kInvalidArgument);
                       EXPECT_EQ(told,
                                 path.string() + ": write() was called already; another save is another StagedSave");
                     }),
            all(2, kFine));
  expect(3, path);
  EXPECT_EQ(names(), std::set<std::string>{"a.safetensors"});
}

TEST_F(Staged, TwoOfOneGroupAreWrittenOneAfterTheOther) {
  const auto path = folder_ / "a.safetensors";
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       Rows mine(group);
                       mine.become(5);
                       StagedSave first(group, mine.views(), path);
                       std::vector<std::byte> memory(first.staging_bytes()), more(first.staging_bytes());
                       first.stage(memory);
                       mine.become(6);
                       StagedSave second(group, mine.views(), path);
                       second.stage(more);
                       mine.become(7);
                       second.write();
                       first.write();  // the last one stays
                     }),
            all(2, kFine));
  expect(5, path);
}

TEST_F(Staged, TwoOfTwoGroupsToOnePathWaitForEachOther) {
  const auto path = folder_ / "a.safetensors";
  auto others = threads(2);
  std::atomic<int> written{0};
  const ProgressFn slow = [](int64_t, int64_t) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       Group& other = *others[static_cast<size_t>(group.rank())];
                       Rows mine(group);
                       mine.become(8);
                       StagedSave first(group, mine.views(), path, {.progress = slow}),
                           second(other, mine.views(), path, {.progress = slow});
                       auto behind = std::async(std::launch::async, [&] { second.write(); });
                       first.write();
                       behind.get();
                       ++written;
                     }),
            all(2, kFine));
  EXPECT_EQ(written, 2);
  expect(8, path);
  EXPECT_EQ(names(), std::set<std::string>{"a.safetensors"});
}

TEST_F(Staged, AFailedWriteLeavesTheOldCheckpointAndIsOver) {
  const auto path = folder_ / "a.safetensors";
  const auto codes = on_ranks(2, [&](Group& group) {
    Rows mine(group);
    mine.become(9);
    save(group, mine.views(), path);
    mine.become(10);
    SaveOptions options;
    options.progress = [](int64_t, int64_t) { throw Error(Code::kCorrupt, "not now"); };
    StagedSave staged(group, mine.views(), path, options);
    EXPECT_EQ(code_of([&] { staged.write(); }), Code::kCorrupt);
    EXPECT_EQ(code_of([&] { staged.write(); }), Code::kInvalidArgument);
  });
  EXPECT_EQ(codes, all(2, kFine));
  expect(9, path);
  EXPECT_EQ(names(), std::set<std::string>{"a.safetensors"});
}

TEST_F(Staged, TheCallerNamesWhatItsRoundsAreFor) {
  const SaveOptions options{.timeout = std::chrono::seconds(20)};
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       Rows mine(group);
                       std::string told;
                       group.begin(group.rank() == 0 ? "autosave()" : "load()", options.timeout);
                       EXPECT_EQ(
                           code_of([&] { StagedSave(group, mine.views(), folder_ / "a.safetensors", options); }, &told),
                           Code::kInvalidArgument);
                       EXPECT_EQ(told,
                                 "rank 1 calls load() where rank 0 calls autosave(); every rank must "
                                 "make the same collective calls in the same order");
                     }),
            all(2, kFine));
}

/// What SaveOptions::metadata says.
TEST_F(Staged, MetadataAreRankZerosInEveryFile) {
  EXPECT_EQ(
      on_ranks(
          2,
          [&](Group& group) {
            Rows mine(group), same(group);
            const SaveOptions options{.metadata = {{"run", std::to_string(group.rank())}, {"shardow.crc32", "mine"}}};
            const std::vector<SaveFile> files = {{"a.safetensors", mine.views(), {{"which", "a"}}},
                                                 {"b.safetensors", same.views()}};
            StagedSave(group, files, folder_ / "run", options).write();
          }),
      all(2, kFine));
  const auto a = Checkpoint::open(folder_ / "run" / "a.safetensors").metadata();
  EXPECT_EQ(a.at("run"), "0");
  EXPECT_EQ(a.at("which"), "a");
  EXPECT_EQ(Checkpoint::open(folder_ / "run" / "b.safetensors").metadata().at("run"), "0");
  EXPECT_TRUE(Checkpoint::open(folder_ / "run" / "a.safetensors").tensor("w").crc32.has_value())
      << "ours, not somebody else's";
}

struct Holds {
  long memory;  ///< resident, in bytes
  long descriptors, threads;
};

Holds holds() {
  long all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  const auto entries = [](const char* path) {
    return static_cast<long>(std::distance(fs::directory_iterator(path), {}));
  };
  return {resident * ::sysconf(_SC_PAGESIZE), entries("/proc/self/fd"), entries("/proc/self/task")};
}

TEST(ManySaves, HoldNoMoreThanFew) {
  const fs::path memory = "/dev/shm";
  const fs::path folder =
      (fs::is_directory(memory) ? memory : fs::path(testing::TempDir())) / ("many_saves_" + std::to_string(::getpid()));
  fs::create_directories(folder);
  const int saves = kSlow ? 200 : 1000;
  Held held("a", DType::kF32, Region::whole({40, 3}));
  std::vector<std::byte> staging(held.memory.size());
  const auto group = solo();
  Holds few{}, many{};
  for (int i = 1; i <= saves; ++i) {
    std::fill(held.memory.begin(), held.memory.end(), static_cast<std::byte>(i % 100));
    StagedSave save(*group, std::span(&held.view, 1), folder / ("model" + std::to_string(i % 3)));
    save.stage(staging);
    auto written = std::async(std::launch::async, [&] { save.write(); });
    std::fill(held.memory.begin(), held.memory.end(), std::byte{0xee});
    written.get();
    if (i == saves / 10) few = holds();
    if (i == saves) many = holds();
  }
  std::fill(staging.begin(), staging.end(), static_cast<std::byte>(saves % 100));
  load(*group, std::span(&held.view, 1), folder / ("model" + std::to_string(saves % 3)));
  EXPECT_EQ(held.memory, staging);
  fs::remove_all(folder);
  EXPECT_LT(many.memory - few.memory, kSlow ? 1 << 30 : 4 << 20);  // sanitizers keep what is freed
  EXPECT_LE(many.descriptors, few.descriptors + 2);
  EXPECT_LE(many.threads, few.threads + 2);
}

}  // namespace
}  // namespace shardow
