// An Average with its state in files: by any number of ranks, with the same bytes, and back to any other number. Ranks
// are threads. Files that do not fit, and ranks that disagree: what is said, and that nothing has changed.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "average/average_fixture.h"
#include "base/folder_fixture.h"
#include "ema/names.h"
#include "shardow/ema_file.h"

namespace shardow {
namespace {

const std::vector<Schedule> kOne = {Schedule::warmup(0.999)},
                            kTwo = {Schedule::constant(0.5), Schedule::constant(0.99)};

/// A rank's rows of one weight, and all of a second one, whose values no sharding changes; averaged.
struct Rank {
  int64_t first;
  OwnTensor rows, whole;
  Average ema;

  Rank(int rank, int size, std::vector<Schedule> schedules)
      : first(kRows * rank / size),
        rows("rows", Region::grid({kRows, kColumns}, {{{first, kRows * (rank + 1) / size}}, {{0, kColumns}}}), 1),
        whole("whole", {5}, 1),
        ema(weights_at(-1), {.schedules = std::move(schedules)}) {}

  void train(int begin, int end) {
    for (int step = begin; step < end; ++step) {
      weights_at(step);
      ema.update();
    }
  }
  std::vector<TensorView> weights_at(int step) {
    int64_t at = first * kColumns;
    for (float& value : rows.values)
      value = static_cast<float>(at++ % 97) * 0.37f - static_cast<float>(step * step) * 0.11f;
    for (float& value : whole.values) value = static_cast<float>(step) * 1.25f;
    return {rows.view, whole.view};
  }
};

class SavedAverage : public InFolder {
 protected:
  /// body(group) on every rank; what each threw.
  static std::vector<std::string> on_ranks(int size, const std::function<void(Group&)>& body) {
    auto groups = threads(size);
    std::vector<std::string> said(groups.size());
    std::vector<std::jthread> ranks;
    for (auto& group : groups) {
      ranks.emplace_back([&] {
        try {
          body(*group);
        } catch (const std::exception& error) {
          said[static_cast<size_t>(group->rank())] = error.what();
        }
      });
    }
    ranks.clear();
    return said;
  }
  static std::vector<std::string> fine(int size) { return std::vector<std::string>(static_cast<size_t>(size)); }

  void save_by(int size, const std::vector<Schedule>& schedules, const fs::path& path, int steps) {
    EXPECT_EQ(on_ranks(size,
                       [&](Group& group) {
                         Rank rank(group.rank(), size, schedules);
                         rank.train(0, steps);
                         save(group, rank.ema, path);
                       }),
              fine(size));
  }
};

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
    EXPECT_EQ(files, static_cast<int>(schedules.size() + (schedules.size() > 1)));  // with the list of their names
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

/// What a rank did wrong, and what all are told.
struct Mistake {
  const char* says;
  std::function<void(Group&, Rank&)> call;
};

TEST_F(SavedAverage, OfRanksThatDisagreeIsAnErrorOnAll) {
  save_by(2, kOne, folder_ / "good.safetensors", 3);
  const std::string good = bytes_of(folder_ / "good.safetensors");
  const fs::path path = folder_ / "good.safetensors";
  const auto with_state_of_rank_1 = [&](const std::string& from, const std::string& to) {
    return [&path, from, to](Group& group, Rank& rank) {
      std::string state = rank.ema.state();
      if (group.rank() == 1) state.replace(state.find(from), from.size(), to);
      rank.ema.set_state(state);
      save(group, rank.ema, path);
    };
  };
  const std::vector<Mistake> mistakes = {
      {"the number of updates of the averages is 3 on rank 0 and 4 on rank 1; call update() on every rank",
       [&](Group& group, Rank& rank) {
         if (group.rank() == 1) rank.train(3, 4);
         save(group, rank.ema, path);
       }},
      {"ranks disagree. step is 3 on rank 0 and 7 on rank 1", with_state_of_rank_1("\"step\":3", "\"step\":7")},
      {"ranks disagree. seed is 0 on rank 0 and 9 on rank 1", with_state_of_rank_1("\"seed\":\"0\"", "\"seed\":\"9\"")},
      {"ranks disagree. schedule is ",
       [&](Group& group, Rank& rank) {
         Rank other(group.rank(), 2, {group.rank() == 1 ? Schedule::constant(0.5) : Schedule::constant(0.25)});
         other.train(0, 3);
         save(group, group.rank() == 1 ? other.ema : rank.ema, path);
       }},
      {"save(): 'whole' has other values on rank 0 than on rank 1",
       [&](Group& group, Rank& rank) {
         if (group.rank() == 1) static_cast<float*>(rank.ema.views()[1].data)[3] += 1;
         save(group, rank.ema, path);
       }},
      {"swap back first",
       [&](Group& group, Rank& rank) {
         if (group.rank() == 1) rank.ema.swap_in();
         try {
           save(group, rank.ema, path);
         } catch (...) {
           rank.ema.swap_out();
           throw;
         }
       }},
      {"ranks disagree. options is 'file' on rank 0 and 'own' on rank 1",
       [&](Group& group, Rank& rank) {
         load(group, rank.ema, path, {}, group.rank() == 1 ? OptionsFrom::kOwn : OptionsFrom::kFile);
       }},
      {"swap back first",
       [&](Group& group, Rank& rank) {
         if (group.rank() == 1) rank.ema.swap_in();
         try {
           load(group, rank.ema, path, {.timeout = std::chrono::seconds(5)});
         } catch (...) {
           if (group.rank() == 1) rank.ema.swap_out();
           throw;
         }
       }},
      {"inference", [&](Group& group, Rank& rank) { save(group, rank.ema, path, {.dtype = DType::kBF16}); }},
      {"choose another key",
       [&](Group& group, Rank& rank) {
         save(group, rank.ema, path, {.metadata = {{kStateKey, "mine"}}});
       }},
  };
  for (const auto& [says, call] : mistakes) {
    const std::vector<std::string> said = on_ranks(2, [&, &made = call](Group& group) {
      Rank rank(group.rank(), 2, kOne);
      rank.train(0, 3);
      const std::vector<float> before = copy_of(rank.ema.views()[0]);
      try {
        made(group, rank);
      } catch (...) {
        if (rank.ema.stats().step == 3) {
          EXPECT_EQ(copy_of(rank.ema.views()[0]), before) << says;
        }
        throw;
      }
    });
    for (const std::string& one : said) EXPECT_NE(one.find(says), std::string::npos) << says << ": " << one;
    EXPECT_TRUE(bytes_of(path) == good) << says;
  }
}

TEST_F(SavedAverage, ThatDoesNotFitChangesNothing) {
  save_by(1, kOne, folder_ / "one.safetensors", 3);
  save_by(1, kTwo, folder_ / "two", 3);
  const std::unique_ptr<Group> group = solo();
  Rank one(0, 1, kOne), two(0, 1, kTwo), other(0, 1, kOne);
  OwnTensor narrow("rows", {kRows, kColumns - 1}, 1);
  Average smaller(std::vector{narrow.view, one.whole.view}, {.schedules = kOne});
  save(*group, one.ema.views(), folder_ / "weights.safetensors");
  std::ofstream(folder_ / "text.safetensors") << "not a checkpoint at all";
  fs::create_directory(folder_ / "empty");
  save_by(1, kTwo, folder_ / "half", 3);
  fs::remove(folder_ / "half" / ema_file_name("0.99"));
  const struct {
    Average& ema;
    const char* path;
    Code code;
    const char* says;
  } cases[] = {
      {one.ema, "two", Code::kInvalidArgument, "has the averages of 2 decays (0.5, 0.99), this EMA keeps one average"},
      {two.ema, "one.safetensors", Code::kInvalidArgument, "has one average (warmup"},
      {one.ema, "weights.safetensors", Code::kCorrupt, "is not a saved EMA: its metadata has no 'shardow.state'"},
      {one.ema, "text.safetensors", Code::kCorrupt, "text.safetensors"},
      {one.ema, "none.safetensors", Code::kNotFound, "none.safetensors"},
      {two.ema, "none", Code::kNotFound, "none"},
      {two.ema, "empty", Code::kNotFound, "ema-0.5.safetensors is not there"},
      {two.ema, "half", Code::kCorrupt, "ema-0.99.safetensors is not there; what is there: ema-0.5.safetensors"},
      {smaller, "one.safetensors", Code::kInvalidArgument, "'rows' has shape [37, 11] in the file and [37, 10] here"},
  };
  for (const auto& [ema, path, code, says] : cases) {
    const std::string before = ema.state();
    const std::vector<float> values = copy_of(ema.views()[0]);
    EXPECT_NE(message_of([&, &one_ema = ema, &at = path] { load(*group, one_ema, folder_ / at); }, code).find(says),
              std::string::npos)
        << message_of([&, &one_ema = ema, &at = path] { load(*group, one_ema, folder_ / at); }, code);
    EXPECT_EQ(ema.state(), before) << says;
    EXPECT_EQ(copy_of(ema.views()[0]), values) << says;
  }
}

TEST_F(SavedAverage, BesideOtherTensorsIsNotRounded) {
  const std::unique_ptr<Group> group = solo();
  Rank rank(0, 1, kOne);
  rank.train(0, 3);
  std::vector<SaveFile> files = ema_files(*group, rank.ema);
  files[0].name = "ema.safetensors";
  files.push_back({"weights.safetensors", {rank.rows.view}});
  const auto saved = [&](DType dtype) { save(*group, files, folder_ / "run", {.dtype = dtype}); };
  const std::string said = message_of([&] { saved(DType::kBF16); }, Code::kInvalidArgument);
  EXPECT_NE(said.find("'rows' of ema.safetensors is F32 and a run goes on from it: dtype BF16"), std::string::npos)
      << said;
  EXPECT_FALSE(fs::exists(folder_ / "run"));
  saved(DType::kF32);
  files.erase(files.begin());
  saved(DType::kBF16);
  EXPECT_EQ(Checkpoint::open(folder_ / "run" / "weights.safetensors").tensor("rows").dtype, DType::kBF16);
}

TEST_F(SavedAverage, IsLoadedFromWhatIsOpen) {
  save_by(2, kOne, folder_ / "one.safetensors", 3);
  Rank there(0, 1, kOne);
  there.train(0, 3);
  const auto state = there.ema.state();  // two threads may not ask for it at once
  const auto averages = copy_of(there.ema.views()[1]);
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       const Checkpoint opened = Checkpoint::open(group, folder_ / "one.safetensors");
                       group.all_gather("", std::chrono::steady_clock::now() + std::chrono::minutes(1));
                       if (group.rank() == 0) fs::remove(folder_ / "one.safetensors");
                       Rank here(group.rank(), 2, kOne);
                       const EmaLoadReport report = load(group, here.ema, opened);
                       EXPECT_EQ(here.ema.state(), state);
                       EXPECT_EQ(copy_of(here.ema.views()[1]), averages);
                       EXPECT_GT(report.bytes_read, 0);
                     }),
            fine(2));
  const std::unique_ptr<Group> group = solo();
  save_by(1, kTwo, folder_ / "two", 3);
  Rank two(0, 1, kTwo);
  const Checkpoint half = Checkpoint::open(folder_ / "two" / ema_file_name("0.5"));
  const std::string said = message_of([&] { load(*group, two.ema, half); }, Code::kInvalidArgument);
  EXPECT_NE(said.find("is one file, and this EMA keeps 2 averages"), std::string::npos) << said;
  EXPECT_EQ(two.ema.stats().step, 0);
}

TEST_F(SavedAverage, TellsWhichOptionsAreOthersAndWhoseHold) {
  save_by(2, kTwo, folder_ / "two", 3);
  const std::unique_ptr<Group> group = solo();
  const std::vector<Schedule> turned = {kTwo[1], kTwo[0]};
  for (const OptionsFrom from : {OptionsFrom::kFile, OptionsFrom::kOwn}) {
    Rank there(0, 1, kTwo), here(0, 1, turned);
    there.train(0, 3);
    const EmaLoadReport report = load(*group, here.ema, folder_ / "two", {}, from);
    const bool file = from == OptionsFrom::kFile;
    EXPECT_EQ(report.changed.size(), file ? 2u : 0u);
    for (const size_t k : {0u, 1u})  // its own order by key, or the file's
      EXPECT_EQ(copy_of(here.ema.views(k)[0]), copy_of(there.ema.views(file ? k : 1 - k)[0])) << k;
    EXPECT_EQ(decay_keys(here.ema.schedules()), decay_keys(file ? kTwo : turned));
    EXPECT_EQ(here.ema.stats().updates, 3);
  }
}

TEST_F(SavedAverage, ThatIsDamagedLeavesTheStateAsItWas) {
  const fs::path path = folder_ / "one.safetensors";
  save_by(1, kOne, path, 3);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end).put('x');
  file.close();
  const std::unique_ptr<Group> group = solo();
  Rank rank(0, 1, kOne);
  rank.train(0, 1);
  const std::string before = rank.ema.state();
  EXPECT_NE(message_of([&] { load(*group, rank.ema, path); }, Code::kCorrupt).find("load another checkpoint"),
            std::string::npos);
  EXPECT_EQ(rank.ema.state(), before);
}

}  // namespace
}  // namespace shardow
