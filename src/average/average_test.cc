// Updates in host memory are compared with the reference recursion, also where the parameters' memory moves between
// updates.
#include "shardow/average.h"

#include "average/average_fixture.h"
#include "base/allocations_fixture.h"

namespace shardow {
namespace {

TEST(Average, TakesFactorsFromTheCallerAndCountsAsEver) {
  OwnTensor p("p", {kRows, kColumns}, 1);
  Average ema(std::vector{p.view}, with_decay(0.5));
  std::vector<float> expected = p.values;
  p.fill(2);
  const Factors factors{0.9, 1 - 0.9};
  EXPECT_TRUE(ema.update_by({&factors, 1}).applied);
  lerp(expected, p.values, 1 - 0.9);
  EXPECT_EQ(copy_of(ema.views()[0]), expected);
  EXPECT_EQ(ema.stats().step, 1);
  EXPECT_NE(message_of([&] { ema.update_by({}); }, Code::kInvalidArgument).find("0 factors for 1 averages"),
            std::string::npos);
}

TEST(Average, BeginsWithWhatItsMemoryHoldsWhereAsked) {
  OwnTensor p("p", {kRows, kColumns}, 1), average("p", {kRows, kColumns}, 2);
  const std::vector<float> kept = average.values;
  AverageOptions options = with_decay(0.5);
  options.keep_values = true;
  Average ema(std::vector{p.view}, std::vector<std::vector<TensorView>>{{average.view}}, options);
  EXPECT_EQ(average.values, kept);
  ema.reset();
  EXPECT_EQ(average.values, p.values);
}

TEST(Average, BeginsEqualToTheParameters) {
  OwnTensor p("p", {kRows, kColumns}, 1);
  const Average ema(std::vector{p.view});
  EXPECT_EQ(copy_of(ema.views()[0]), p.values);
}

TEST(Average, EmptyBracesAreTheDefaultOptionsNotTheCallersMemory) {
  OwnTensor p("p", {kRows, kColumns}, 1);
  const Average ema(std::vector{p.view}, {});
  ASSERT_EQ(ema.size(), 1u);
  EXPECT_EQ(ema.schedules()[0], AverageOptions{}.schedules[0]);
  EXPECT_EQ(copy_of(ema.views()[0]), p.values);
}

TEST(Average, FollowsTheRecursionBitForBit) {
  OwnTensor p("p", {kRows, kColumns}, 1);
  Average ema(std::vector{p.view}, with_decay(0.99));
  std::vector<float> expected = p.values;
  for (uint32_t step = 0; step < 30; ++step) {
    p.fill(100 + step);
    EXPECT_TRUE(ema.update().applied);
    lerp(expected, p.values, 1 - 0.99);
  }
  EXPECT_EQ(copy_of(ema.views()[0]), expected);
  EXPECT_EQ(ema.stats().step, 30);
  EXPECT_EQ(ema.stats().updates, 30);
}

TEST(Average, KeepsSeveralDecaysInOnePass) {
  OwnTensor p("p", {kRows}, 1), q("q", {5}, 2);
  AverageOptions options{.schedules = {Schedule::constant(0.5), Schedule::constant(0.9), Schedule::constant(0.999)}};
  Average ema(std::vector{p.view, q.view}, options);
  const std::vector<double> decays = {0.5, 0.9, 0.999};
  std::vector<std::vector<float>> expected(3, p.values);
  for (uint32_t step = 0; step < 5; ++step) {
    p.fill(step);
    ema.update();
    for (size_t k = 0; k < 3; ++k) lerp(expected[k], p.values, 1 - decays[k]);
  }
  for (size_t k = 0; k < 3; ++k) EXPECT_EQ(copy_of(ema.views(k)[0]), expected[k]) << k;
}

TEST(Average, EveryKthStepAppliesDecayToTheKth) {
  OwnTensor p("p", {kRows}, 1);
  AverageOptions options = with_decay(0.9);
  options.update_every = 3;
  Average ema(std::vector{p.view}, options);
  std::vector<float> expected = p.values;
  for (uint32_t step = 1; step <= 7; ++step) {
    p.fill(step);
    EXPECT_EQ(ema.update().applied, step % 3 == 0);
    if (step % 3 == 0) lerp(expected, p.values, -std::expm1(3 * std::log(0.9)));
  }
  EXPECT_EQ(copy_of(ema.views()[0]), expected);
}

TEST(Average, AReplayOnTheHostIsTheUpdateOfItsStepOrNothing) {
  OwnTensor tensor("p", {300, 7}, 1);
  AverageOptions options = with_decay(0.9);
  options.update_every = 3;
  Average replayed(std::vector{tensor.view}, options), updated(std::vector{tensor.view}, options);
  for (uint32_t step = 1; step <= 7; ++step) {
    tensor.fill(step);
    if (step == 2) tensor.values[5] = std::nanf("");
    EXPECT_EQ(replayed.prepare_replay().applied, updated.update().applied) << step;
    EXPECT_EQ(copy_of(replayed.views(0)[0]), copy_of(updated.views(0)[0])) << step;
    EXPECT_EQ(replayed.state(), updated.state()) << step;
  }
}

TEST(Average, SkippedStepsAreMadeUpFor) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  std::vector<float> expected = p.values;
  p.fill(2);
  ema.update(5);
  lerp(expected, p.values, -std::expm1(5 * std::log(0.9)));
  EXPECT_EQ(copy_of(ema.views()[0]), expected);
}

TEST(Average, CopiesUntilStartStep) {
  OwnTensor p("p", {kRows}, 1);
  AverageOptions options = with_decay(0.9);
  options.start_step = 2;
  Average ema(std::vector{p.view}, options);
  for (uint32_t step = 1; step <= 2; ++step) {
    p.fill(step);
    ema.update();
    EXPECT_EQ(copy_of(ema.views()[0]), p.values);
  }
  std::vector<float> expected = p.values;
  p.fill(3);
  ema.update();
  lerp(expected, p.values, 1 - 0.9);
  EXPECT_EQ(copy_of(ema.views()[0]), expected);
  EXPECT_EQ(ema.stats().updates, 1);
}

TEST(Average, TheFirstUpdatePastStartStepCopiesWhereNoneCameBefore) {
  OwnTensor p("p", {kRows}, 1);
  AverageOptions options = with_decay(0.999999);
  options.start_step = 100;
  options.update_every = 4;
  Average ema(std::vector{p.view}, options);
  p.fill(2);
  EXPECT_TRUE(ema.update(102).applied);
  EXPECT_EQ(copy_of(ema.views()[0]), p.values);
  std::vector<float> expected = p.values;
  p.fill(3);
  EXPECT_FALSE(ema.update(105).applied);
  EXPECT_TRUE(ema.update(106).applied);
  EXPECT_NE(copy_of(ema.views()[0]), p.values);
}

TEST(Average, StepsBeforeStartStepAreNotAveraged) {
  OwnTensor p("p", {kRows}, 1);
  AverageOptions options{.schedules = {Schedule::constant(0.9), Schedule::debiased(0.9), Schedule::half_life(3)}};
  options.start_step = 100;
  Average ema(std::vector{p.view}, options);
  p.fill(2);
  ema.update(40);
  std::vector<std::vector<float>> expected(3, p.values);
  p.fill(3);
  ema.update(102);
  lerp(expected[0], p.values, -std::expm1(2 * std::log(0.9)));
  expected[1] = p.values;  // Adam's mean of what came since start_step
  lerp(expected[2], p.values, -std::expm1(-std::log(2.0) * (2.0 / 3)));
  for (size_t k = 0; k < 3; ++k) EXPECT_EQ(copy_of(ema.views(k)[0]), expected[k]) << k;
}

TEST(Average, AnUpdateAllocatesNothing) {
  OwnTensor p("p", {3, 1 << 20}, 1);
  AverageOptions options{.schedules = {Schedule::constant(0.999), Schedule::constant(0.99999)}};
  options.num_threads = 2;
  Average ema(std::vector{p.view}, options);
  ema.update();
  EXPECT_EQ(base::allocations_of([&] { ema.update(); }), 0);
}

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
      const std::vector moved_views{moved.view};
      failed = base::fails_at_allocation(refused, [&] { ema.bind(moved_views); });
      if (!failed) break;
      p.fill(3);
      EXPECT_TRUE(ema.update().applied) << refused;
      straight.update();
      EXPECT_EQ(copy_of(ema.views()[0]), copy_of(straight.views()[0])) << refused;
      EXPECT_NE(copy_of(ema.views()[0]), start.values) << refused;
      ema.bind(moved_views);
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
