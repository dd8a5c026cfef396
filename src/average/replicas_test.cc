// Ranks that hold the same views, as threads: they divide the work, and where their swap fails while they send each
// other their parts, all of them are back where they were, or all that are left can be.
#include "average/replicas.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>

#include "average/average_fixture.h"
#include "group/ranks.h"
#include "shardow/average.h"
#include "tensor/region_oracle_fixture.h"

namespace shardow {
namespace {

using oracle::pick;
using oracle::Random;
using Levels = std::vector<average::ReplicaLevel>;

/// Returns every rank's levels in groups that nest: counts 2 and 3 give (0, 0), (0, 1), (0, 2), (1, 0), ...
std::vector<Levels> levels_of_ranks(const std::vector<int>& counts) {
  std::vector<Levels> ranks{{}};
  for (const int count : counts) {
    std::vector<Levels> next;
    for (const Levels& outer : ranks) {
      for (int index = 0; index < count; ++index) {
        next.push_back(outer);
        next.back().push_back({index, count});
      }
    }
    ranks = next;
  }
  return ranks;
}

std::vector<int> random_counts(Random& random) {
  std::vector<int> counts(static_cast<size_t>(pick(random, 0, 3)));
  for (int& count : counts) count = static_cast<int>(pick(random, 1, 4));
  return counts;
}

TEST(Replicas, OwnEveryElementOnce) {
  Random random(31);
  for (int i = 0; i < 400; ++i) {
    const Region held = oracle::random_sample(random, i % 2 == 0).region;
    const std::vector<int64_t> elements = oracle::elements(held);
    std::vector<int64_t> joined;
    for (const Levels& levels : levels_of_ranks(random_counts(random))) {
      const auto [region, begin] = average::owned(held, levels);
      EXPECT_EQ(begin, static_cast<int64_t>(joined.size()));
      const auto part = oracle::elements(region);
      joined.insert(joined.end(), part.begin(), part.end());
    }
    EXPECT_EQ(joined, elements) << held.to_string();
  }
}

TEST(Replicas, RefuseAPlaceOutsideTheirLevel) {
  for (const average::ReplicaLevel level : {average::ReplicaLevel{2, 2}, {-1, 2}, {0, 0}})
    EXPECT_THROW(average::owned(Region::whole({4}), std::vector{level}), Error);
}

TEST(Average, ReplicasDivideTheWorkAndSwapWhole) {
  constexpr int kMost = 8;
  for (int ranks = 1; ranks <= kMost; ++ranks) {
    OwnTensor start("p", {kRows, kColumns}, 1), dense_p("p", {kRows, kColumns}, 1);
    Average dense(std::vector{dense_p.view}, with_decay(0.9));
    dense_p.fill(2);
    dense.update();
    auto groups = threads(ranks);
    std::vector<std::unique_ptr<OwnTensor>> local;
    for (int rank = 0; rank < ranks; ++rank)
      local.push_back(std::make_unique<OwnTensor>("p", Shape{kRows, kColumns}, 1));
    std::vector<int64_t> elements(static_cast<size_t>(ranks));
    std::vector<std::vector<float>> inside(static_cast<size_t>(ranks));
    std::vector<std::thread> workers;
    for (int rank = 0; rank < ranks; ++rank) {
      workers.emplace_back([&, rank] {
        const auto at = static_cast<size_t>(rank);
        AverageOptions options = with_decay(0.9);
        options.replicas = groups[at].get();
        Average ema(std::vector{local[at]->view}, options);
        local[at]->fill(2);
        ema.update();
        elements[at] = ema.stats().elements;
        ema.swap_in();
        inside[at] = local[at]->values;
        ema.swap_out();
      });
    }
    for (std::thread& worker : workers) worker.join();
    int64_t total = 0;
    for (size_t rank = 0; rank < static_cast<size_t>(ranks); ++rank) {
      EXPECT_EQ(inside[rank], copy_of(dense.views()[0]));
      EXPECT_EQ(local[rank]->values, dense_p.values);
      EXPECT_LE(elements[rank], kRows * kColumns / ranks + 16);
      total += elements[rank];
    }
    EXPECT_EQ(total, kRows * kColumns);
  }
}

constexpr int kRanks = 3;

/// A rank that, from its `first`-th broadcast on, names another length in `failures` of them, which is an error on
/// every rank; or that dies there, where `failures` is kDies.
class Failing final : public group::Ranks {
 public:
  static constexpr int kDies = -1;

  Failing(std::unique_ptr<Group> inner, int first, int failures)
      : inner_(std::move(inner)), first_(first), failures_(failures) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return kRanks; }
  void begin(std::string_view call, std::chrono::milliseconds timeout) override { alive().begin(call, timeout); }
  std::vector<std::string> all_gather(std::string_view own, Deadline deadline) override {
    return alive().all_gather(own, deadline);
  }
  Met decide(std::string_view own, const Decide& decide, Deadline deadline) override {
    return alive().decide(own, decide, deadline);
  }
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override { alive().send(bytes, to, deadline); }
  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override { alive().recv(bytes, from, deadline); }

  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    const int index = broadcasts_++;
    if (index == first_ && failures_ == kDies) inner_.reset();
    const bool fails = index >= first_ && index < first_ + failures_;
    alive().broadcast(fails ? bytes.first(bytes.size() - 1) : bytes, root, deadline);
  }
  int broadcasts() const { return broadcasts_; }

 private:
  group::Ranks& alive() const { return group::ranks_of(inner_ ? *inner_ : throw Error(Code::kPeerFailed, "dead")); }

  std::unique_ptr<Group> inner_;
  const int rank_ = inner_->rank(), first_, failures_;
  int broadcasts_ = 0;
};

/// A rank's weights of two dtypes, one of them kept aside in a swap, and averages that differ from them.
struct Replica {
  std::vector<float> f32 = std::vector<float>(100), f16 = std::vector<float>(24);
  Average ema;

  explicit Replica(Group& group)
      : ema(views(), {.schedules = {Schedule::constant(0.5)}, .replicas = &group, .timeout = std::chrono::minutes(2)}) {
    for (size_t i = 0; i < f32.size(); ++i) f32[i] = static_cast<float>(i + 1);
    ema.update();
  }
  std::vector<TensorView> views() {
    return {{"f32", DType::kF32, Region::whole({100}), f32.data()},
            {"f16", DType::kF16, Region::whole({48}), f16.data()}};
  }
  std::vector<std::vector<float>> averages() const { return {copy_of(ema.views()[0]), copy_of(ema.views()[1])}; }
};

/// Calls body(group, replica) on every rank, of which the last one fails.
void on_ranks(int first, int failures, const std::function<void(Failing&, Replica&)>& body) {
  auto groups = threads(kRanks);
  std::vector<std::jthread> ranks;
  for (auto& group : groups) {
    ranks.emplace_back([&, inner = std::move(group)]() mutable {
      const bool last = inner->rank() == kRanks - 1;
      Failing failing(std::move(inner), first, last ? failures : 0);
      Replica replica(failing);
      body(failing, replica);
    });
  }
}

bool throws(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

TEST(ReplicasOfManyTensors, SendWhatEachOfThemOwnsInOneBroadcast) {
  auto groups = threads(kRanks);
  std::vector<std::jthread> ranks;
  for (auto& group : groups) {
    ranks.emplace_back([inner = std::move(group)]() mutable {
      Failing counted(std::move(inner), 0, 0);
      std::vector<float> weights(60000, 1);
      std::vector<TensorView> views;
      for (int64_t i = 0; i < 200; ++i)
        views.push_back(
            {"p" + std::to_string(i), DType::kF32, Region::whole({300}), &weights[static_cast<size_t>(300 * i)]});
      Average ema(views, {.schedules = {Schedule::constant(0.5)}, .replicas = &counted});
      std::fill(weights.begin(), weights.end(), 3.0f);
      ema.update();
      ema.swap_in();
      EXPECT_EQ(counted.broadcasts(), kRanks);
      EXPECT_EQ(weights, std::vector<float>(60000, 2));
      ema.swap_out();
      EXPECT_EQ(counted.broadcasts(), 2 * kRanks);
      EXPECT_EQ(weights, std::vector<float>(60000, 3));
    });
  }
}

TEST(ReplicasThatFail, WhileTheySendEachOtherTheirPartsAllComeBack) {
  std::atomic<int> failed = 0, through = 0;
  for (int first = 0; through == 0; ++first) {
    ASSERT_LT(first, 100);
    on_ranks(first, 1, [&](Failing&, Replica& replica) {
      const std::vector<float> before = replica.f32;
      const auto averages = replica.averages();
      if (throws([&] { replica.ema.swap_in(); })) {
        ++failed;
        EXPECT_FALSE(replica.ema.swapped()) << first;
        EXPECT_EQ(replica.f32, before) << first;
        EXPECT_EQ(replica.averages(), averages) << first;
        replica.ema.swap_in();
      } else {
        ++through;
      }
      EXPECT_NE(replica.f32, before);
      if (throws([&] { replica.ema.swap_out(); })) replica.ema.swap_out();  // where it failed there, it goes on
      EXPECT_EQ(replica.f32, before);
      EXPECT_EQ(replica.averages(), averages);
    });
  }
  EXPECT_EQ(through, kRanks);          // fails on all ranks or on none
  EXPECT_GE(failed, kRanks * kRanks);  // a broadcast of each owner
}

TEST(ReplicasThatFail, AndFailOnTheWayBackTooKeepTheSwapOpenForSwapOut) {
  on_ranks(1, 2, [&](Failing&, Replica& replica) {
    const std::vector<float> before = replica.f32;
    const auto averages = replica.averages();
    EXPECT_TRUE(throws([&] { replica.ema.swap_in(); }));
    EXPECT_TRUE(replica.ema.swapped());
    EXPECT_TRUE(throws([&] { replica.ema.update(); }));
    replica.ema.swap_out();
    EXPECT_FALSE(replica.ema.swapped());
    EXPECT_EQ(replica.f32, before);
    EXPECT_EQ(replica.averages(), averages);
  });
}

TEST(ReplicasThatFail, AndDieLeaveTheOthersTheirOwnParts) {
  on_ranks(1, Failing::kDies, [&](Failing& group, Replica& replica) {
    const std::vector<float> before = replica.f32;
    EXPECT_TRUE(throws([&] { replica.ema.swap_in(); }));
    EXPECT_TRUE(replica.ema.swapped());
    EXPECT_TRUE(throws([&] { replica.ema.swap_out(); }));
    EXPECT_TRUE(replica.ema.swapped());
    { const Average ended = std::move(replica.ema); }
    const Box own = Region::whole({100}).part(group.rank(), kRanks).boxes()[0];
    const auto begin = own.offsets[0], end = begin + own.sizes[0];
    EXPECT_TRUE(std::equal(replica.f32.begin() + begin, replica.f32.begin() + end, before.begin() + begin));
  });
}

}  // namespace
}  // namespace shardow
