#include <gtest/gtest.h>

#include "base/allocations_fixture.h"
#include "shardow/region.h"
#include "tensor/region_oracle_fixture.h"

namespace shardow {
namespace {

using oracle::Random;
using oracle::random_sample;
using oracle::Sample;

using Runs = std::vector<Run>;  // a test's own Run is gtest's

Runs runs_of(const Region& region) {
  Runs runs;
  region.for_each_run([&](const Run& run) { runs.push_back(run); });
  return runs;
}

TEST(RegionRuns, OfSmallRegions) {
  struct Case {
    Region region;
    Runs runs;
  };
  const Case cases[] = {
      {Region::whole({}), {{0, 0, 1}}},
      {Region::whole({}).window(1, 1), {}},
      {Region::whole({6, 4}), {{0, 0, 24}}},
      {Region::whole({3, 0, 2}), {}},
      {Region::grid({6, 4}, {{{2, 4}}, {{0, 4}}}), {{8, 0, 8}}},
      {Region::grid({3, 4}, {{{0, 3}}, {{1, 3}}}), {{1, 0, 2}, {5, 2, 2}, {9, 4, 2}}},
      {Region::grid({3, 4}, {{{0, 1}, {2, 3}}, {{0, 2}}}), {{0, 0, 2}, {8, 2, 2}}},
      {Region::grid({3, 4}, {{}, {{0, 4}}}), {}},
      // The end of a row and the begin of the next are one run.
      {Region::grid({2, 5}, {{{0, 2}}, {{0, 2}, {4, 5}}}), {{0, 0, 2}, {4, 2, 3}, {9, 5, 1}}},
      {Region::grid({4, 2, 3}, {{{1, 3}}, {{0, 2}}, {{0, 2}}}).window(1, 7),
       {{7, 0, 1}, {9, 1, 2}, {12, 3, 2}, {15, 5, 1}}},
      {Region::whole({4, 5}).window(3, 17), {{3, 0, 14}}},
  };
  for (const Case& c : cases) EXPECT_EQ(runs_of(c.region), c.runs) << c.region.to_string();
}

TEST(RegionRuns, ListTheElementsAndAreMaximal) {
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    const Sample sample = random_sample(random, i % 2 == 1);
    SCOPED_TRACE(sample.region.to_string());
    ASSERT_EQ(oracle::elements(sample.region), sample.elements);
    EXPECT_EQ(sample.region.size(), static_cast<int64_t>(sample.elements.size()));
    int64_t local = 0, last_end = -1;
    for (const auto& run : runs_of(sample.region)) {
      EXPECT_GT(run.length, 0);
      EXPECT_EQ(run.local_begin, local);
      EXPECT_GT(run.global_begin, last_end) << "runs that touch are one run";
      local += run.length;
      last_end = run.global_begin + run.length;
    }
    EXPECT_EQ(sample.region.num_runs(), static_cast<int64_t>(runs_of(sample.region).size()));
    EXPECT_EQ(sample.region.contiguous(), sample.region.num_runs() <= 1);
  }
}

TEST(RegionRuns, AllocateNothing) {
  const Region region = Region::grid({30, 4, 9}, {{{1, 5}, {9, 30}}, {{0, 3}}, {{2, 4}, {6, 9}}}).window(5, 370);
  int64_t sum = 0;
  EXPECT_EQ(base::allocations_of([&] { region.for_each_run([&](const auto& run) { sum += run.length; }); }), 0);
  EXPECT_EQ(sum, 365);
}

TEST(RegionRuns, StartAtTheWindowWithoutWalkingToIt) {
  const Region region = Region::grid({int64_t{1} << 40, 4}, {{{0, int64_t{1} << 40}}, {{0, 2}}});
  const int64_t last = region.size() - 3;  // walking 2^40 rows would not end
  EXPECT_EQ(runs_of(region.window(last, region.size())),
            (Runs{{(int64_t{1} << 42) - 7, 0, 1}, {(int64_t{1} << 42) - 4, 1, 2}}));
}

TEST(RegionRuns, ReachTheEndOf64Bits) {
  EXPECT_EQ(runs_of(Region::whole({kMax})), (Runs{{0, 0, kMax}}));
  EXPECT_EQ(runs_of(Region::grid({kMax / 7, 7}, {{{kMax / 7 - 1, kMax / 7}}, {{5, 7}}})),
            (Runs{{kMax / 7 * 7 - 2, 0, 2}}));
}

}  // namespace
}  // namespace shardow
