#include "average/division.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/errors.h"
#include "tensor/region_oracle_fixture.h"

namespace shardow {
namespace {

using oracle::pick;
using oracle::Random;
using Levels = std::vector<ReplicaLevel>;

/// Every rank's levels, of groups that nest: 2 and 3 are (0, 0), (0, 1), (0, 2), (1, 0), ...
std::vector<Levels> everybody(const std::vector<int>& counts) {
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

std::vector<Divided> random_tensors(Random& random) {
  std::vector<Divided> tensors;
  for (int64_t n = pick(random, 1, 9); n > 0; --n) {
    const bool large = pick(random, 0, 3) == 0;
    const Region region = large ? Region::whole({pick(random, 100, 900)}) : oracle::random_sample(random, true).region;
    tensors.push_back({region, pick(random, 0, 1) == 0 ? 2 : 4, 0});
    tensors.back().kind = tensors.back().itemsize;
  }
  return tensors;
}

TEST(Division, EveryElementHasOneOwner) {
  Random random(31);
  for (int i = 0; i < 400; ++i) {
    const Region held = oracle::random_sample(random, i % 2 == 0).region;
    const std::vector<int64_t> elements = oracle::elements(held);
    std::vector<int64_t> joined;
    for (const Levels& levels : everybody(random_counts(random))) {
      const auto [region, begin] = owned(held, levels);
      EXPECT_EQ(begin, static_cast<int64_t>(joined.size()));
      const auto part = oracle::elements(region);
      joined.insert(joined.end(), part.begin(), part.end());
    }
    EXPECT_EQ(joined, elements) << held.to_string();
  }
}

/// Replicas that do what their plans say: a step of a group is done when all its members have come to it.
class Exchange {
 public:
  Exchange(const std::vector<Divided>& tensors, const std::vector<int>& counts, int64_t bytes)
      : ranks_(everybody(counts)) {
    for (const Levels& levels : ranks_) {
      plans_.push_back(plan_exchange(tensors, levels, bytes));
      auto& memory = memory_.emplace_back();
      for (const Divided& one : tensors) {
        const auto [region, begin] = owned(one.region, levels);
        memory.emplace_back(static_cast<size_t>(one.region.size()), false);
        std::fill_n(memory.back().begin() + begin, region.size(), true);
      }
    }
  }

  void run() {
    std::vector<size_t> done(ranks_.size());
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (done[rank] == plans_[rank].size()) continue;
        const ExchangeStep& step = plans_[rank][done[rank]];
        const std::vector<size_t> group = members(rank, step.level);
        const bool ready = std::all_of(group.begin(), group.end(), [&](size_t one) {
          return done[one] < plans_[one].size() && plans_[one][done[one]] == step;  // the same on all members
        });
        if (!ready) continue;
        send(step, group);
        for (const size_t one : group) ++done[one];
        moved = true;
      }
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      EXPECT_EQ(done[rank], plans_[rank].size()) << "rank " << rank << " waits for ever";
  }

  const std::vector<std::vector<std::vector<bool>>>& memory() const { return memory_; }
  const std::vector<std::vector<ExchangeStep>>& plans() const { return plans_; }
  const std::vector<Levels>& ranks() const { return ranks_; }

 private:
  /// Ranks that differ from `rank` in this level alone, in its order.
  std::vector<size_t> members(size_t rank, size_t level) const {
    std::vector<size_t> found;
    for (size_t other = 0; other < ranks_.size(); ++other) {
      bool same = true;
      for (size_t i = 0; i < ranks_[rank].size(); ++i)
        same = same && (i == level || ranks_[other][i].index == ranks_[rank][i].index);
      if (same) found.push_back(other);
    }
    return found;
  }

  void send(const ExchangeStep& step, const std::vector<size_t>& group) {
    for (size_t owner = 0; owner < group.size(); ++owner) {
      for (const auto& [tensor, begin, end] : step.members[owner]) {
        for (int64_t at = begin; at < end; ++at) {
          const auto element = static_cast<size_t>(at);
          EXPECT_TRUE(memory_[group[owner]][tensor][element]) << "what is sent has arrived before";
          for (const size_t other : group) memory_[other][tensor][element] = true;
        }
      }
    }
  }

  std::vector<Levels> ranks_;
  std::vector<std::vector<ExchangeStep>> plans_;
  std::vector<std::vector<std::vector<bool>>> memory_;  // of each rank and tensor: elements that are the owner's
};

TEST(Division, AfterAnExchangeEverybodyHasEverything) {
  Random random(32);
  for (int i = 0; i < 300; ++i) {
    Exchange exchange(random_tensors(random), random_counts(random), pick(random, 1, 2000));
    exchange.run();
    for (const auto& rank : exchange.memory()) {
      for (const auto& tensor : rank) ASSERT_EQ(std::count(tensor.begin(), tensor.end(), false), 0) << "case " << i;
    }
  }
}

TEST(Division, StepsAreBoundedAndSendNothingTwice) {
  Random random(33);
  for (int i = 0; i < 300; ++i) {
    const auto tensors = random_tensors(random);
    const int64_t bytes = pick(random, 1, 2000);
    const Exchange exchange(tensors, random_counts(random), bytes);
    for (size_t rank = 0; rank < exchange.ranks().size(); ++rank) {
      std::map<std::pair<size_t, size_t>, int64_t> sent;  // elements of each level and tensor
      for (const ExchangeStep& step : exchange.plans()[rank]) {
        const auto count = static_cast<int64_t>(step.members.size());
        ASSERT_EQ(count, exchange.ranks()[rank][step.level].count);
        int64_t total = 0;
        const Divided& first = tensors[step.members[0].at(0).tensor];
        for (const auto& stretches : step.members) {
          for (const auto& [tensor, begin, end] : stretches) {
            EXPECT_EQ(tensors[tensor].kind, first.kind);
            total += (end - begin) * first.itemsize;
            sent[{step.level, tensor}] += end - begin;
          }
        }
        EXPECT_GT(total, 0);
        EXPECT_LE(total, std::max(bytes, count * first.itemsize));
      }
      for (const auto& [key, elements] : sent) {
        const Levels outer(exchange.ranks()[rank].begin(),
                           exchange.ranks()[rank].begin() + static_cast<int64_t>(key.first));
        EXPECT_EQ(elements, owned(tensors[key.second].region, outer).region.size());
      }
    }
  }
}

TEST(Division, OfSmallTensorsAndALargeOne) {
  const std::vector<Divided> tensors = {
      {Region::whole({40}), 4, 0}, {Region::whole({3}), 4, 0}, {Region::whole({100}), 4, 0}};
  const Levels levels = {{1, 2}};
  const std::vector<ExchangeStep> expected = {
      {0, {{{0, 0, 32}, {1, 0, 3}}, {{0, 32, 40}, {1, 3, 3}}}},  // parts are cut at multiples of 16 elements
      {0, {{{2, 0, 25}}, {{2, 64, 89}}}},
      {0, {{{2, 25, 50}}, {{2, 89, 100}}}},
      {0, {{{2, 50, 64}}, {{2, 100, 100}}}},
  };
  EXPECT_EQ(plan_exchange(tensors, levels, 200), expected);
  EXPECT_TRUE(plan_exchange(tensors, {}, 200).empty());
}

TEST(Division, RefusesPlacesOutsideTheirLevelAndSizesBelowOne) {
  const std::vector<Divided> tensors = {{Region::whole({4}), 4}}, hollow = {{Region::whole({4}), 0}};
  const Levels fine = {{0, 2}};
  for (const ReplicaLevel level : {ReplicaLevel{2, 2}, {-1, 2}, {0, 0}}) {
    EXPECT_THROW(plan_exchange(tensors, std::vector{level}), Error);
    EXPECT_THROW(owned(tensors[0].region, std::vector{level}), Error);
  }
  EXPECT_THROW(plan_exchange(hollow, fine), Error);
  EXPECT_THROW(plan_exchange(tensors, fine, 0), Error);
}

}  // namespace
}  // namespace shardow
