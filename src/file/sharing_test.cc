// Compares saves whose ranks list their tensors in different ways.
#include "file/sharing.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/turns.h"
#include "delegate.h"
#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

using std::chrono::milliseconds;

class Sharing : public Checkpoints {
 protected:
  /// Saves on two ranks what `make` gives each; the file's bytes.
  std::string saved(const std::function<std::vector<Held>(int rank)>& make, const SaveOptions& options = {},
                    int ranks = 2) {
    const fs::path path = folder_ / "a.safetensors";
    EXPECT_EQ(on_ranks(ranks,
                       [&](Group& group) {
                         auto held = make(group.rank());
                         save(group, views_of(held), path, options);
                       }),
              all(ranks, kFine));
    return bytes_of(path);
  }
};

TEST_F(Sharing, OfTheSameTensorsServesWhereverTheirMemoryIsAndWhateverTheirValues) {
  const auto make = [](int rank) { return hold(rows, rank, 2, true); };
  const std::string first = saved(make);
  EXPECT_EQ(saved(make), first);
  version = 5;
  const std::string other = saved(make);
  EXPECT_NE(other, first);
  EXPECT_EQ(other, saved([](int) { return hold(whole, 0, 1, true); }, {}, 1));
  version = 0;
}

TEST_F(Sharing, FollowsOneRankThatHasSomethingElse) {
  const auto make = [](int rank) { return hold(rows, rank, 2, true); };
  const std::string before = saved(make);
  const auto with_more = [&](int rank) {
    auto held = make(rank);
    if (rank == 1) held.push_back(Held("only there", DType::kF32, Region::whole({3})));
    return held;
  };
  const std::string more = saved(with_more);
  EXPECT_NE(more.find("only there"), std::string::npos);
  EXPECT_EQ(saved(with_more), more);
  EXPECT_EQ(saved(make), before);
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group) {
                       auto held = make(group.rank());
                       if (group.rank() == 1) held[0] = Held(held[0].view.name, DType::kF32, rows({38, 11}, 1, 2));
                       save(group, views_of(held), folder_ / "a.safetensors");
                     }),
            all(2, static_cast<int>(Code::kInvalidArgument)));
  EXPECT_EQ(saved(make), before);
}

TEST_F(Sharing, OfRanksWhoseOrderDiffersIsOneList) {
  auto held = hold(rows, 0, 2, true);
  file::SharedTensors forwards(views_of(held), 0);
  std::reverse(held.begin(), held.end());
  EXPECT_EQ(file::SharedTensors(views_of(held), 0).words(), forwards.words());
}

TEST_F(Sharing, OfEqualRegionsHasOnePieceHoweverTheyAreDescribed) {
  const Shape shape = {4, 5};
  const std::string reference = saved([&](int) {
    std::vector<Held> held;
    held.emplace_back("w", DType::kF32, Region::whole(shape));
    return held;
  });
  const auto make = [&](int rank) {
    const Region by_rows[] = {Region::grid(shape, {{{0, 1}}, {{0, 5}}}), Region::grid(shape, {{{1, 4}}, {{0, 5}}})};
    const Region by_numbers[] = {Region::whole(shape).window(0, 5), Region::whole(shape).window(5, 20)};
    EXPECT_NE(by_rows[1].encode(), by_numbers[1].encode());
    std::vector<Held> held;
    for (const Region& region : rank == 0 ? by_rows : by_numbers) held.emplace_back("w", DType::kF32, region);
    return held;
  };
  EXPECT_EQ(saved(make), reference);
}

/// Saves of a tensor of which ranks hold what does not fit together.
class Misfits : public Checkpoints {
 protected:
  void expect_refused(const std::vector<std::vector<std::pair<DType, Region>>>& by_rank,
                      Code code = Code::kInvalidArgument, const SaveOptions& options = {}) {
    const int ranks = static_cast<int>(by_rank.size());
    EXPECT_EQ(on_ranks(ranks,
                       [&](Group& group) {
                         std::vector<Held> held;
                         for (const auto& [dtype, region] : by_rank[static_cast<size_t>(group.rank())])
                           held.emplace_back("w", dtype, region);
                         save(group, views_of(held), folder_ / "a.safetensors", options);
                       }),
              all(ranks, static_cast<int>(code)));
    EXPECT_TRUE(names().empty());
  }
};

TEST_F(Misfits, OfOtherShapesAreRefusedWhateverIsHeldOfThem) {
  expect_refused({{{DType::kF32, Region::whole({4})}}, {{DType::kF32, Region::whole({5}).window(0, 0)}}});
  expect_refused(
      {{{DType::kF32, Region::whole({2, 6}).window(0, 6)}}, {{DType::kF32, Region::whole({3, 4}).window(6, 12)}}});
}

TEST_F(Misfits, OfATensorThatARankHasTwiceAreRefused) {
  const std::pair w{DType::kF32, Region::whole({2, 3})};
  expect_refused({{w, w}, {}});
  expect_refused({{w}, {w, w}});
}

TEST_F(Misfits, OfRegionsThatBeginAlikeAndAreAsLargeAreRefused) {
  const Region row = Region::grid({4, 4}, {{{0, 1}}, {{0, 4}}}), column = Region::grid({4, 4}, {{{0, 4}}, {{0, 1}}});
  expect_refused({{{DType::kF32, row}}, {{DType::kF32, column}}, {{DType::kF32, Region::whole({4, 4}).window(4, 16)}}});
}

TEST_F(Misfits, OfTypesBelow16BitsAreNotCast) {
  expect_refused({{{DType::kF8E4M3, Region::whole({4})}}}, Code::kUnsupported, {.dtype = DType::kF32});
  expect_refused({{{DType::kF32, Region::whole({4})}}}, Code::kUnsupported, {.dtype = DType::kF8E4M3});
}

/// Rank 1's stripes never come.
class SilentSender : public Delegate {
 public:
  using Delegate::Delegate;
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    if (rank() == 1) std::this_thread::sleep_for(milliseconds(3000));
    group_.send(bytes, to, deadline);
  }
};

TEST_F(Sharing, TellsWithinTheTimeoutWhoseStripesDoNotCome) {
  std::mutex mutex;
  std::string message;
  on_ranks(3, [&](Group& inner) {
    SilentSender group(inner);
    Held held("w", DType::kF32, columns({600, 30}, inner.rank(), 3));
    const Deadline in_time = base::after(milliseconds(2500));
    try {
      save(group, std::vector{held.view}, folder_ / "a.safetensors", {.timeout = milliseconds(1500)});
    } catch (const Error& error) {
      const std::scoped_lock lock(mutex);
      if (inner.rank() == 2) message = error.what();
      EXPECT_TRUE(inner.rank() == 1 || base::after(milliseconds(0)) < in_time);
    }
  });
  EXPECT_NE(message.find(" rank(s) [1] did not take part"), std::string::npos) << message;
}

/// Late in every decide() by so much, on rank 1.
class LateRank : public Delegate {
 public:
  LateRank(Group& group, std::vector<milliseconds> by) : Delegate(group), by_(std::move(by)) {}
  Met decide(std::string_view mine, const Decide& decide, Deadline deadline) override {
    if (rank() == 1 && next_ < by_.size()) std::this_thread::sleep_for(by_[next_++]);
    waited_ = base::now();
    return group_.decide(mine, decide, deadline);
  }
  Deadline waited() const { return waited_; }  ///< since when in the last round

 private:
  std::vector<milliseconds> by_;
  size_t next_ = 0;
  Deadline waited_;
};

/// Every tensor that some rank has, from all ranks' views.
std::vector<file::Shared> shared_by(Group& group, std::span<const TensorView> views, milliseconds timeout) {
  file::SharedTensors shared(views, group.rank());
  group::CollectiveCall(group, timeout).compare([&] { return group::Comparisons{&shared}; });
  return shared.all;
}

/// Takes two rounds: all ranks send their regions, then each kind of ranks its list, since nobody knows the third's.
std::vector<int> share_late(std::vector<milliseconds> by, milliseconds timeout, milliseconds* longest) {
  std::mutex mutex;
  return on_ranks(3, [&](Group& inner) {
    LateRank group(inner, by);
    std::vector<Held> held;
    held.emplace_back(std::string(1, "abc"[inner.rank()]), DType::kF32, Region::whole({3}));
    const auto measure = [&] {
      const std::scoped_lock lock(mutex);
      *longest = std::max(*longest, std::chrono::duration_cast<milliseconds>(base::now() - group.waited()));
    };
    try {
      EXPECT_EQ(shared_by(group, views_of(held), timeout).size(), 3u);
    } catch (...) {
      if (inner.rank() == 0) measure();
      throw;
    }
  });
}

TEST_F(Sharing, TakesRoundsThatEachHaveTheirTimeSoThatLateIsNotMissing) {
  milliseconds longest{0};
  const milliseconds timeout{3000}, late{2000};
  EXPECT_EQ(share_late({late, late}, timeout, &longest), all(3, kFine));  // 4 s in all
}

TEST_F(Sharing, CostsOneTimeoutWhereARankFallsSilentInAnyOfTheirRounds) {
  const milliseconds timeout{500};
  for (size_t round = 0; round < 2; ++round) {
    std::vector<milliseconds> by(2, milliseconds(0));
    by[round] = 2 * timeout;
    milliseconds longest{0};
    EXPECT_EQ(share_late(by, timeout, &longest), all(3, static_cast<int>(Code::kTimeout)));
    EXPECT_GE(longest, timeout * 9 / 10);
    EXPECT_LT(longest, timeout * 19 / 10);
  }
}

}  // namespace
}  // namespace shardow
