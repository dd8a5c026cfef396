// Parameters whose memory moves between updates.
#include "average/average_fixture.h"
#include "base/allocations.h"
#include "shardow/average.h"

namespace shardow {
namespace {

TEST(Average, BindsParametersThatMoved) {
  OwnTensor p("p", {kRows}, 1), moved("p", {kRows}, 2);
  Average ema(std::vector{p.view}, with_decay(0.9));
  std::vector<float> expected = p.values;
  ema.update(std::vector{moved.view});
  lerp(expected, moved.values, 1 - 0.9);
  EXPECT_EQ(copy_of(ema.views()[0]), expected);
}

TEST(Average, ABindThatFindsNoMemoryChangesNothing) {
  const OwnTensor start("p", columns(), 1);
  for (const double decay : {0.9, 0.99999}) {
    long refused = 0;
    for (bool failed = true; failed; ++refused) {
      OwnTensor p("p", columns(), 1), moved("p", columns(), 2);
      Average ema(std::vector{p.view}, with_decay(decay)), straight(std::vector{p.view}, with_decay(decay));
      const std::vector now{moved.view};
      failed = base::fails_at_allocation(refused, [&] { ema.bind(now); });
      if (!failed) break;
      p.fill(3);
      EXPECT_TRUE(ema.update().applied) << refused;
      straight.update();
      EXPECT_EQ(copy_of(ema.views()[0]), copy_of(straight.views()[0])) << refused;
      EXPECT_NE(copy_of(ema.views()[0]), start.values) << refused;
      ema.bind(now);
      moved.fill(4);
      p.values = moved.values;
      ema.update();
      straight.update();
      EXPECT_EQ(copy_of(ema.views()[0]), copy_of(straight.views()[0])) << refused;
    }
    EXPECT_GT(refused, 5);
  }
}

}  // namespace
}  // namespace shardow
