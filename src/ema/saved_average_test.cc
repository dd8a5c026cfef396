// An Average with its state in files: by any number of ranks, with the same bytes, and back to any other number. Ranks
// are threads.
#include "ema/saved_average_fixture.h"

namespace shardow {
namespace {

TEST_F(SavedAverage, HasTheSameBytesFromAnyNumberOfRanks) {
  for (const int size : {1, 2, 3, 5}) {
    save_by(size, kOne, folder_ / ("one" + std::to_string(size) + ".safetensors"), 4);
    save_by(size, kTwo, folder_ / ("two" + std::to_string(size)), 4);
  }
  for (const char* size : {"2", "3", "5"}) {
    EXPECT_TRUE(bytes_of(folder_ / ("one" + std::string(size) + ".safetensors")) ==
                bytes_of(folder_ / "one1.safetensors"))
        << size;
    for (const char* name : {"ema-0.5.safetensors", "ema-0.99.safetensors"})
      EXPECT_TRUE(bytes_of(folder_ / ("two" + std::string(size)) / name) == bytes_of(folder_ / "two1" / name)) << size;
  }
  EXPECT_GT(bytes_of(folder_ / "one1.safetensors").size(), 4096u + kRows * kColumns * 4);
}

TEST_F(SavedAverage, GoesOnAtAnotherNumberOfRanksAsIfItHadNotStopped) {
  for (const auto& schedules : {kOne, kTwo}) {
    const fs::path saved = folder_ / "saved", straight = folder_ / "straight", resumed = folder_ / "resumed";
    save_by(2, schedules, saved, 4);
    save_by(1, schedules, straight, 9);
    EXPECT_EQ(on_ranks(3,
                       [&](Group& group) {
                         Rank rank(group.rank(), 3, schedules);
                         rank.weights_at(77);
                         const EmaLoadReport report = load(group, rank.ema, saved);
                         EXPECT_TRUE(report.changed.empty());
                         EXPECT_GT(report.bytes_read, 0);
                         rank.train(4, 9);
                         save(group, rank.ema, resumed);
                       }),
              fine(3));
    int files = 0;
    for (const auto& one : fs::directory_iterator(straight)) {
      EXPECT_TRUE(bytes_of(one.path()) == bytes_of(resumed / one.path().filename())) << one.path();
      ++files;
    }
    EXPECT_EQ(files, static_cast<int>(schedules.size()));
    for (const fs::path& one : {saved, straight, resumed}) fs::remove_all(one);
  }
}

TEST_F(SavedAverage, ComesInTheFilesOrderAlsoBesideAModel) {
  const std::vector<Schedule> turned = {kTwo[1], kTwo[0]};
  const auto group = solo();
  Rank saved(0, 1, kTwo);
  saved.train(0, 4);
  std::vector<SaveFile> files = ema_files(*group, saved.ema);
  files.push_back({"model.safetensors", saved.weights_at(3)});
  save(*group, files, folder_ / "run");
  Rank rank(0, 1, turned);
  load(*group, rank.ema, folder_ / "run");
  EXPECT_EQ(rank.ema.state(), saved.ema.state());
  for (size_t k = 0; k < 2; ++k) {
    const auto* const one = static_cast<const float*>(saved.ema.views(k)[0].data);
    const auto* const other = static_cast<const float*>(rank.ema.views(k)[0].data);
    EXPECT_TRUE(std::equal(one, one + kRows * kColumns, other)) << k;
  }
}

TEST_F(SavedAverage, IsWrittenInTheBackgroundAsItWasWhenItWasStaged) {
  save_by(2, kTwo, folder_ / "straight", 3);
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       Rank rank(group.rank(), 2, kTwo);
                       rank.train(0, 3);
                       StagedSave staged(group, ema_files(group, rank.ema), folder_ / "staged", {});
                       std::vector<std::byte> memory(staged.staging_bytes());
                       staged.stage(memory);
                       rank.train(3, 5);
                       staged.write();
                     }),
            fine(2));
  for (const char* name : {"ema-0.5.safetensors", "ema-0.99.safetensors"})
    EXPECT_TRUE(bytes_of(folder_ / "staged" / name) == bytes_of(folder_ / "straight" / name));
}

TEST_F(SavedAverage, CountsOfARanksOwnPartAreSummedAndComeBackOnce) {
  const fs::path path = folder_ / "a.safetensors";
  std::vector<int64_t> back(2);
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       Rank rank(group.rank(), 2, kOne);
                       rank.weights_at(0);
                       for (int i = 0; i <= group.rank(); ++i) rank.rows.values[static_cast<size_t>(i)] = NAN;
                       rank.ema.update();
                       save(group, rank.ema, path);
                       load(group, rank.ema, path);
                       back[static_cast<size_t>(group.rank())] = rank.ema.stats().held_non_finite;
                     }),
            fine(2));
  EXPECT_EQ(back, (std::vector<int64_t>{3, 0}));
}

}  // namespace
}  // namespace shardow
