// What a load costs between ranks, and what it says where they ask for different things.
#include "file/load.h"

#include "delegate.h"
#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

/// Counts the rounds of the group that it stands for.
class CountedRounds : public Delegate {
 public:
  using Delegate::Delegate;

  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    ++rounds;
    return group_.all_gather(mine, deadline);
  }
  Met decide(std::string_view mine, const Decide& decide, Deadline deadline) override {
    ++rounds;
    return group_.decide(mine, decide, deadline);
  }
  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    ++rounds;
    group_.broadcast(bytes, root, deadline);
  }

  int rounds = 0;
};

class Load : public Checkpoints {
 protected:
  /// Of every rank, which loads all tensors as `sharding` has them.
  std::vector<int> rounds(const Sharding& sharding, int ranks, const LoadOptions& options) {
    std::vector<int> counted(static_cast<size_t>(ranks), 0);
    const auto codes = on_ranks(ranks, [&](Group& group) {
      CountedRounds counting(group);
      auto held = hold(sharding, group.rank(), ranks, false);
      load(counting, views_of(held), path_, options);
      counted[static_cast<size_t>(group.rank())] = counting.rounds;
    });
    EXPECT_EQ(codes, all(ranks, kFine));
    return counted;
  }

  const fs::path path_ = folder_ / "a.safetensors";
};

TEST_F(Load, IsThreeRounds) {
  ASSERT_EQ(save_as(path_, rows, 2), all(2, kFine));
  for (const auto& [name, sharding] : kShardings) EXPECT_EQ(rounds(sharding, 3, {}), all(3, 3)) << name;
  EXPECT_EQ(rounds(rows, 3, {.verify = false}), all(3, 3));
  LoadOptions told;
  told.progress = [](int64_t, int64_t) {};
  EXPECT_EQ(rounds(rows, 3, told), all(3, 4)) << "the last of them tells of progress";
}

TEST_F(Load, OfWhatFourRoundsHaveSaved) {
  for (const auto& [name, sharding] : kShardings) {
    std::vector<int> counted(3, 0);
    EXPECT_EQ(on_ranks(3,
                       [&, of = sharding](Group& group) {
                         CountedRounds counting(group);
                         auto held = hold(of, group.rank(), 3, true);
                         save(counting, views_of(held), path_);
                         counted[static_cast<size_t>(group.rank())] = counting.rounds;
                       }),
              all(3, kFine));
    EXPECT_EQ(counted, all(3, 4)) << name;
    EXPECT_EQ(load_as(path_, rows, 2), all(2, kFine)) << name;
  }
}

TEST_F(Load, OfALongHeaderIsOneRoundMore) {
  std::vector<Held> held;
  for (int i = 0; i < 20'000; ++i)
    held.emplace_back("a tensor with a long name, of which there are many: " + std::to_string(i), DType::kU8,
                      Region::whole({1}));
  save(*solo(), views_of(held), path_);
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       CountedRounds counting(group);
                       Held one("none of them", DType::kU8, Region::whole({1}));
                       LoadOptions options;
                       options.strict = false;
                       EXPECT_EQ(load(counting, std::span(&one.view, 1), path_, options).unexpected.size(),
                                 held.size());
                       EXPECT_EQ(counting.rounds, 4);
                     }),
            all(2, kFine));
}

TEST_F(Load, ThatIsStrictOnOneRankIsStrictOnAll) {
  ASSERT_EQ(save_as(path_, rows, 1), all(1, kFine));
  EXPECT_EQ(on_ranks(3,
                     [&](Group& group) {
                       Held held("half", DType::kBF16, Region::whole({8, 5, 3}));
                       LoadOptions options;
                       options.strict = group.rank() == 1;
                       options.timeout = std::chrono::seconds(5);
                       load(group, std::span(&held.view, 1), path_, options);
                     }),
            all(3, static_cast<int>(Code::kInvalidArgument)));
}

TEST_F(Load, ThatIsStrictNamesWhatTheFileLacks) {
  ASSERT_EQ(save_as(path_, rows, 1), all(1, kFine));
  auto held = hold(whole, 0, 1, false);
  held.emplace_back("not there", DType::kF32, Region::whole({1}));
  EXPECT_EQ(load(*solo(), views_of(held), path_, {.strict = false}).missing, std::vector<std::string>{"not there"});
  try {
    load(*solo(), views_of(held), path_);
    ADD_FAILURE() << "nothing was missing";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("missing in the file: not there"), std::string::npos) << error.what();
  }
}

TEST_F(Load, TellsWhatIsWantedAndNotWhatLiesBetween) {
  ASSERT_EQ(save_as(path_, rows, 2), all(2, kFine));
  int64_t last = 0, in_all = 0;
  LoadOptions options;
  options.progress = [&](int64_t done, int64_t total) {
    EXPECT_LE(done, total);
    last = done;
    in_all = total;
  };
  rounds(columns, 3, options);  // short runs, with gaps that are read as well
  EXPECT_EQ(last, in_all);
}

}  // namespace
}  // namespace shardow
