// Averages that take a saved state go on bit-identically, with the file's options or with others, or refuse it.
#include <limits>

#include "average/average_fixture.h"
#include "average/impl.h"
#include "base/allocations_fixture.h"
#include "shardow/average.h"

namespace shardow {
namespace {

TEST(Average, ResumesBitIdentically) {
  OwnTensor p("p", {kRows}, 1);
  AverageOptions options{.schedules = {Schedule::constant(0.9), Schedule::constant(0.99999)}};
  options.update_every = 2;
  options.seed = ~uint64_t{0};
  Average straight(std::vector{p.view}, options), first(std::vector{p.view}, options);
  for (uint32_t step = 0; step < 5; ++step) {
    p.fill(step);
    straight.update();
    first.update();
  }
  Average resumed(std::vector{p.view}, {.schedules = {Schedule::constant(0.1), Schedule::constant(0.2)}});
  for (size_t k = 0; k < 2; ++k)
    std::copy_n(static_cast<float*>(first.views(k)[0].data), kRows, static_cast<float*>(resumed.views(k)[0].data));
  resumed.set_state(first.state());
  EXPECT_EQ(resumed.state(), first.state());
  for (uint32_t step = 5; step < 11; ++step) {
    p.fill(step);
    straight.update();
    resumed.update();
  }
  for (size_t k = 0; k < 2; ++k) EXPECT_EQ(copy_of(resumed.views(k)[0]), copy_of(straight.views(k)[0]));
}

TEST(Average, AStateThatFindsNoMemoryChangesNothing) {
  OwnTensor p("p", columns(), 1);
  Average other(std::vector{p.view},
                {.schedules = {Schedule::constant(0.99999)}, .rounding = Rounding::kStochastic, .seed = 5});
  other.update();
  const std::string state = other.state();
  for (long n = 0;; ++n) {
    Average ema(std::vector{p.view}, {.schedules = {Schedule::constant(0.9)}, .rounding = Rounding::kNearest});
    const std::string before = ema.state();
    if (!base::fails_at_allocation(n, [&] { ema.set_state(state); })) break;
    EXPECT_EQ(ema.state(), before) << n;
    EXPECT_TRUE(ema.update().applied);
  }
}

TEST(Average, GoesOnWithTheOptionsOfTheFileOrItsOwn) {
  const AverageOptions saved_options{.schedules = {Schedule::constant(0.99999)},
                                     .rule = Rule::kLerp,
                                     .rounding = Rounding::kStochastic,
                                     .update_every = 2,
                                     .start_step = 1,
                                     .seed = 9};
  const AverageOptions own_options{
      .schedules = {Schedule::half_life(10)}, .rule = Rule::kMulAdd, .rounding = Rounding::kNearest, .seed = 3};
  for (const OptionsFrom from : {OptionsFrom::kFile, OptionsFrom::kOwn}) {
    OwnTensor p("p", columns(), 1);
    Average saved(std::vector{p.view}, saved_options), resumed(std::vector{p.view}, own_options);
    Average straight(std::vector{p.view}, from == OptionsFrom::kFile ? saved_options : own_options);
    saved.update(4);
    straight.update(4);
    std::copy_n(static_cast<float*>(saved.views()[0].data), columns().size(),
                static_cast<float*>(resumed.views()[0].data));
    std::copy_n(static_cast<float*>(saved.views()[0].data), columns().size(),
                static_cast<float*>(straight.views()[0].data));
    resumed.set_state(saved.state(), from);
    EXPECT_EQ(resumed.state(), straight.state());
    p.fill(2);
    resumed.update(6);
    straight.update(6);
    EXPECT_EQ(copy_of(resumed.views()[0]), copy_of(straight.views()[0]));
  }
}

TEST(Average, TellsWhichOptionsDifferFromAState) {
  OwnTensor p("p", {kRows}, 1);
  Average two(std::vector{p.view},
              {.schedules = {Schedule::constant(0.9), Schedule::mean()}, .rule = Rule::kMulAdd, .seed = 9});
  Average own(std::vector{p.view},
              {.schedules = {Schedule::constant(0.9), Schedule::power(0.1)}, .dtype = DType::kF64, .update_every = 3});
  std::vector<std::string> names;
  for (const OptionDifference& difference : own.differences(two.state())) names.push_back(difference.name);
  EXPECT_EQ(names, (std::vector<std::string>{"schedule/1", "rule", "update_every", "seed", "dtype"}));
  EXPECT_EQ(own.differences(two.state())[2].file, "1");
  EXPECT_EQ(own.differences(two.state())[2].own, "3");
  EXPECT_TRUE(two.differences(two.state()).empty());
  EXPECT_TRUE(own.differences(Average(std::vector{p.view}).state()).size() > 1);
}

TEST(Average, OptionsOfAFileMustFitTheMemoryHere) {
  OwnTensor p("p", {kRows}, 1);
  Average nearest(std::vector{p.view}, {.rounding = Rounding::kNearest});
  Average narrow(std::vector{p.view}, {.dtype = DType::kBF16});
  const std::string before = narrow.state();
  EXPECT_NE(message_of([&] { narrow.set_state(nearest.state()); }, Code::kInvalidArgument).find("own options"),
            std::string::npos);
  EXPECT_EQ(narrow.state(), before);
  narrow.set_state(nearest.state(), OptionsFrom::kOwn);
}

TEST(Average, RefusesCountersThatNoAverageHas) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  ema.update(7, 20);
  const std::string good = ema.state();
  const auto with = [&](const std::string& was, const std::string& is) {
    std::string state = good;
    return state.replace(state.find(was), was.size(), is);
  };
  for (const std::string& bad :
       {with(R"("applied_step":7)", R"("applied_step":8)"), with(R"("updates":1)", R"("updates":8)"),
        with(R"("applied_samples":20)", R"("applied_samples":-1)"), with(R"("update_every":1)", R"("update_every":0)"),
        with(R"("rule":"lerp")", R"("rule":"slerp")"), with(R"("dtype":"F32")", R"("dtype":"F33")")}) {
    message_of([&] { ema.set_state(bad); }, Code::kCorrupt);
    EXPECT_EQ(ema.state(), good);
  }
}

TEST(Average, TellsTheNextStepsDecaysAndSamples) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, {.schedules = {Schedule::warmup(0.9), Schedule::mean()}, .start_step = 2});
  EXPECT_EQ(ema.decays(), (std::vector<double>{2.0 / 11, 0}));
  ema.update(5, 40);
  EXPECT_EQ(ema.decays()[0], 5.0 / 14);
  EXPECT_EQ(average::Inside::of(ema).clock.counters.samples_by(8), 48);
  ema.update(7, 50);
  EXPECT_EQ(average::Inside::of(ema).clock.counters.samples_by(8), 58);
  Average seldom(std::vector{p.view}, {.schedules = {Schedule::mean()}, .update_every = 2});
  for (const int64_t step : {2, 5, 6}) seldom.update(step, 10.0 * static_cast<double>(step));
  const Progress next = seldom.progress(75);
  EXPECT_EQ(std::vector({next.step, next.updates, next.delta}), (std::vector<int64_t>{7, 2, 2}));
  EXPECT_EQ(std::vector({next.samples, next.delta_samples}), (std::vector<double>{75, 25}));
  Average samples(std::vector{p.view}, {.schedules = {Schedule::half_life_in_samples(1)}});
  EXPECT_EQ(samples.decays(), std::vector<double>{0.5});
}

/// Tests the example of AverageOptions, and that progress() is what the next update's schedules get.
TEST(Average, CopiesUpToStartStepAndAveragesEveryNthStepByTheProductOfDecays) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view},
              {.schedules = {Schedule::constant(0.9), Schedule::warmup(0.99)}, .update_every = 3, .start_step = 2});
  std::vector<int64_t> copied, averaged;
  for (int64_t step = 1; step <= 12; ++step) {
    const Progress next = ema.progress();
    EXPECT_EQ(next.step, std::max<int64_t>(step - 2, 1));
    EXPECT_EQ(ema.decays()[0], 0.9);
    EXPECT_EQ(ema.decays()[1], (1.0 + static_cast<double>(next.step)) / (10.0 + static_cast<double>(next.step)));
    p.fill(static_cast<uint32_t>(step));
    std::vector<float> average = copy_of(ema.views(1)[0]);
    const UpdateReport report = ema.update();
    if (report.applied && report.factors.decay == 0) {
      copied.push_back(step);
      average = p.values;
    } else if (report.applied) {
      averaged.push_back(step);
      EXPECT_EQ(next.delta, 3);
      EXPECT_NEAR(report.factors.decay, 0.729, 1e-15);
      EXPECT_EQ(report.factors.decay, Schedule::constant(0.9).factors(next).decay);
      lerp(average, p.values, Schedule::warmup(0.99).factors(next).weight);
    }
    EXPECT_EQ(copy_of(ema.views(1)[0]), average) << step;
  }
  EXPECT_EQ(copied, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(averaged, (std::vector<int64_t>{5, 8, 11}));
  EXPECT_EQ(ema.stats().updates, 3);
}

TEST(Average, RestartsAsNewlyMade) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.5));
  const std::string made = ema.state();
  p.values.assign(p.values.size(), 3);
  ema.update(7, 20);
  EXPECT_NE(ema.state(), made);
  p.values.assign(p.values.size(), 5);
  average::Inside::of(ema).restart();
  EXPECT_EQ(ema.state(), made);
  EXPECT_EQ(static_cast<const float*>(ema.views()[0].data)[0], 5);
}

TEST(Average, RefusesAStateThatDoesNotFit) {
  OwnTensor p("p", {kRows}, 1);
  Average single(std::vector{p.view}),
      pair(std::vector{p.view}, {.schedules = {Schedule::constant(0.9), Schedule::constant(0.99)}});
  message_of([&] { single.set_state(pair.state()); }, Code::kInvalidArgument);
  message_of([&] { single.set_state("{}"); }, Code::kCorrupt);
  message_of([&] { single.set_state("not json"); }, Code::kCorrupt);
}

}  // namespace
}  // namespace shardow
