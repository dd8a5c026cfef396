// What an Average promises, on host memory, with the reference recursion written out beside it.
#include "shardow/average.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/allocations.h"
#include "kernels/cuda.h"
#include "shardow/error.h"

namespace shardow {
namespace {

constexpr int64_t kRows = 37, kColumns = 11;

/// A float32 tensor with memory of its own, all of it held.
struct Owned {
  std::vector<float> values;
  TensorView view;

  Owned(std::string name, Shape shape, uint32_t seed) : Owned(std::move(name), Region::whole(std::move(shape)), seed) {}
  Owned(std::string name, const Region& region, uint32_t seed)
      : values(static_cast<size_t>(region.size())), view{std::move(name), DType::kF32, region, nullptr} {
    fill(seed);
    view.data = values.data();
  }

  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(random);
  }
};

std::vector<float> copy_of(const TensorView& view) {
  const auto* data = static_cast<const float*>(view.data);
  return {data, data + view.region.size()};
}

/// The lerp rule, one element at a time.
void lerp(std::vector<float>& average, const std::vector<float>& parameter, double weight) {
  const auto w = static_cast<float>(weight);
  for (size_t i = 0; i < average.size(); ++i) {
    const float p = parameter[i], e = average[i];
    average[i] = w < 0.5f ? std::fmaf(w, p - e, e) : std::fmaf(w - 1, p - e, p);
  }
}

AverageOptions with_decay(double decay) {
  return {.schedules = {Schedule::constant(decay)}};
}

template <typename Fn>
std::string message_of(Fn&& fn, Code code) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(Average, TakesFactorsFromTheCallerAndCountsAsEver) {
  Owned p("p", {kRows, kColumns}, 1);
  Average ema(std::vector{p.view}, with_decay(0.5));
  std::vector<float> expected = p.values;
  p.fill(2);
  const Factors factors{0.9, 1 - 0.9};
  EXPECT_TRUE(ema.update_by({&factors, 1}).applied);
  lerp(expected, p.values, 1 - 0.9);
  EXPECT_EQ(copy_of(ema.views()[0]), expected);
  EXPECT_EQ(ema.stats().step, 1);
  EXPECT_NE(message_of([&] { ema.update_by({}); }, Code::kInvalidArgument).find("0 factors for 1 averages"), std::string::npos);
}

TEST(Average, BeginsWithWhatItsMemoryHoldsWhereAsked) {
  Owned p("p", {kRows, kColumns}, 1), average("p", {kRows, kColumns}, 2);
  const std::vector<float> kept = average.values;
  AverageOptions options = with_decay(0.5);
  options.keep_values = true;
  Average ema(std::vector{p.view}, std::vector<std::vector<TensorView>>{{average.view}}, options);
  EXPECT_EQ(average.values, kept);
  ema.reset();
  EXPECT_EQ(average.values, p.values);
}

TEST(Average, BeginsEqualToTheParameters) {
  Owned p("p", {kRows, kColumns}, 1);
  const Average ema(std::vector{p.view});
  EXPECT_EQ(copy_of(ema.views()[0]), p.values);
}

TEST(Average, FollowsTheRecursionBitForBit) {
  Owned p("p", {kRows, kColumns}, 1);
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
  Owned p("p", {kRows}, 1), q("q", {5}, 2);
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
  Owned p("p", {kRows}, 1);
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

TEST(Average, SkippedStepsAreMadeUpFor) {
  Owned p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  std::vector<float> expected = p.values;
  p.fill(2);
  ema.update(5);
  lerp(expected, p.values, -std::expm1(5 * std::log(0.9)));
  EXPECT_EQ(copy_of(ema.views()[0]), expected);
}

TEST(Average, CopiesUntilStartStep) {
  Owned p("p", {kRows}, 1);
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
  Owned p("p", {kRows}, 1);
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
  Owned p("p", {kRows}, 1);
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

TEST(Average, TheSameWithOneThreadOrMany) {
  Owned p("p", {3, 1 << 20}, 1);
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 3, 7}) {
    p.fill(1);
    AverageOptions options = with_decay(0.99999);
    options.num_threads = threads;
    Average ema(std::vector{p.view}, options);
    p.fill(2);
    ema.update();
    results.push_back(copy_of(ema.views()[0]));
  }
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
}

/// Weights of every magnitude, subnormal ones too; as many as several threads share.
std::vector<float> of_every_magnitude(uint32_t seed) {
  Owned p("p", {1, 1 << 20}, seed);
  for (size_t i = 0; i < p.values.size(); ++i) p.values[i] = std::ldexp(p.values[i], -static_cast<int>(i % 150));
  return p.values;
}

/// What construction, an update, swaps and their ways back leave in the floating-point environment that `set` makes.
std::vector<std::vector<float>> numbers_after(const std::function<void()>& set, int num_threads, DType dtype) {
  static const std::vector<float> start = of_every_magnitude(1), later = of_every_magnitude(2);
  std::vector<float> values = start;
  const TensorView view{"p", DType::kF32, Region::whole({1, 1 << 20}), values.data()};
  AverageOptions options{.schedules = {Schedule::constant(0.9), Schedule::power(0.1)}, .dtype = dtype};
  options.num_threads = num_threads;
  std::vector<std::vector<float>> results;
  std::fenv_t before;
  std::fegetenv(&before);
  set();
  {
    Average ema(std::vector{view}, options);
    values = later;
    ema.update(3);
    for (size_t k = 0; k < 2; ++k) {
      for (int way = 0; way < 2; ++way) {
        way == 0 ? ema.swap_in(k) : ema.swap_out();
        results.push_back(values);
      }
    }
  }
  std::fesetenv(&before);
  return results;
}

TEST(Average, TheFloatingPointEnvironmentOfTheCallerChangesNothing) {
  std::vector<std::pair<const char*, std::function<void()>>> cases = {{"upward", [] { std::fesetround(FE_UPWARD); }},
                                                                      {"towards zero", [] { std::fesetround(FE_TOWARDZERO); }}};
#if defined(__x86_64__)
  cases.emplace_back("flush to zero", [] { _mm_setcsr(_mm_getcsr() | 0x8040); });
#endif
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    const auto expected = numbers_after([] {}, 1, dtype);
    for (const auto& [name, set] : cases) {
      for (const int threads : {1, 3}) EXPECT_TRUE(numbers_after(set, threads, dtype) == expected) << name << " " << threads;
    }
  }
}

TEST(Average, TheEnvironmentOfTheCallerIsBackAfterwards) {
  Owned p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  p.values[0] = std::numeric_limits<float>::infinity();
  std::fesetround(FE_DOWNWARD);
  std::feclearexcept(FE_ALL_EXCEPT);
  ema.update(2);
  EXPECT_EQ(std::fegetround(), FE_DOWNWARD);
  EXPECT_EQ(std::fetestexcept(FE_INVALID), 0);
  std::fesetround(FE_TONEAREST);
}

TEST(Average, TheFirstTensorWithANonFiniteElementIsTheSameOnAnyThreads) {
  std::vector<std::unique_ptr<Owned>> tensors;
  std::vector<TensorView> views;
  for (uint32_t i = 0; i < 40; ++i) {
    tensors.push_back(std::make_unique<Owned>("t" + std::to_string(i), Shape{1 << 16}, i));
    views.push_back(tensors.back()->view);
  }
  for (const size_t bad : {31, 39, 17}) {
    tensors[bad]->values[5] = std::numeric_limits<float>::infinity();
    for (const int threads : {1, 2, 4}) {
      AverageOptions options = with_decay(0.9);
      options.num_threads = threads;
      Average ema(views, options);
      ema.update();
      ASSERT_TRUE(ema.non_finite());
      EXPECT_EQ(ema.non_finite()->tensor, bad == 39 ? "t31" : "t" + std::to_string(bad)) << threads;
    }
  }
}

TEST(Average, AnUpdateAllocatesNothing) {
  Owned p("p", {3, 1 << 20}, 1);
  AverageOptions options{.schedules = {Schedule::constant(0.999), Schedule::constant(0.99999)}};
  options.num_threads = 2;
  Average ema(std::vector{p.view}, options);
  ema.update();
  EXPECT_EQ(base::allocations_of([&] { ema.update(); }), 0);
}

/// The union of the averages of `count` ranks under a cut, as one global tensor.
std::vector<float> averaged_globally(const Shape& shape, const std::vector<Region>& regions, const std::vector<float>& before,
                                     const std::vector<float>& after, AverageOptions options) {
  std::vector<float> result(before.size());
  for (const Region& region : regions) {
    Owned local("p", region, 0);
    const auto scatter = [&](const std::vector<float>& global) {
      region.for_each_run([&](const shardow::Run& run) {
        std::copy_n(global.begin() + run.global_begin, run.length, local.values.begin() + run.local_begin);
      });
    };
    scatter(before);
    Average ema(std::vector{local.view}, options);
    scatter(after);
    ema.update();
    const std::vector<float> average = copy_of(ema.views()[0]);
    region.for_each_run(
        [&](const shardow::Run& run) { std::copy_n(average.begin() + run.local_begin, run.length, result.begin() + run.global_begin); });
  }
  EXPECT_EQ(shape, regions[0].shape());
  return result;
}

TEST(Average, TopologyNeverChangesTheNumbers) {
  const Shape shape = {kRows, kColumns};
  const Owned before("p", shape, 1), after("p", shape, 2);
  std::vector<std::vector<Region>> cuts = {{Region::whole(shape)}};
  for (int ranks = 2; ranks <= 8; ++ranks) {
    std::vector<Region> flat, columns;
    for (int rank = 0; rank < ranks; ++rank) {
      flat.push_back(Region::whole(shape).part(rank, ranks, 1));
      columns.push_back(Region::grid(shape, {{{0, kRows}}, {{kColumns * rank / ranks, kColumns * (rank + 1) / ranks}}}));
    }
    cuts.push_back(flat);
    cuts.push_back(columns);
  }
  for (const double decay : {0.9, 0.99999}) {  // the second rounds stochastically
    const auto whole = averaged_globally(shape, cuts[0], before.values, after.values, with_decay(decay));
    for (const auto& cut : cuts) EXPECT_EQ(averaged_globally(shape, cut, before.values, after.values, with_decay(decay)), whole) << decay;
  }
}

TEST(Average, NoiseNeedsNoTableOfRuns) {
  const Region region = Region::grid({1 << 15, 8}, {{{0, 1 << 15}}, {{3, 7}}});  // 32,768 runs of 4
  Owned p("p", region, 1);
  Average ema(std::vector{p.view}, {.schedules = {Schedule::constant(0.99999)}, .num_threads = 2});
  const int64_t before = ema.stats().table_bytes;
  EXPECT_LT(before, 1024);
  EXPECT_EQ(base::allocations_of([&] { ema.update(); }), 0);
  EXPECT_EQ(ema.stats().table_bytes, before);
}

TEST(Average, NoiseIsOfTheElementInLargeShardsOnManyThreads) {
  const Shape shape = {3, 1 << 11, 700};
  Owned whole("p", shape, 1);
  const Region part = Region::grid(shape, {{{0, 3}}, {{0, 1 << 11}}, {{40, 340}}}).window(77, 1'800'000);
  Owned local("p", part, 0);
  const auto scatter = [&] {
    part.for_each_run([&](const shardow::Run& run) {
      std::copy_n(whole.values.begin() + run.global_begin, run.length, local.values.begin() + run.local_begin);
    });
  };
  scatter();
  Average all(std::vector{whole.view}, {.schedules = {Schedule::constant(0.99999)}, .num_threads = 1});
  Average some(std::vector{local.view}, {.schedules = {Schedule::constant(0.99999)}, .num_threads = 3});
  for (float& value : whole.values) value = value * 3 + 1;
  whole.values[1000] = std::numeric_limits<float>::infinity();
  scatter();
  all.update();
  some.update();
  const std::vector<float> expected = copy_of(all.views()[0]), found = copy_of(some.views()[0]);
  bool equal = true;
  part.for_each_run([&](const shardow::Run& run) {
    equal = equal &&
            std::equal(found.begin() + run.local_begin, found.begin() + run.local_begin + run.length, expected.begin() + run.global_begin);
  });
  EXPECT_TRUE(equal);
}

TEST(Average, SwapExchangesAndUndoesBitForBit) {
  Owned p("p", {kRows}, 1), q("q", {0, 4}, 2);
  Average ema(std::vector{p.view, q.view}, with_decay(0.9));
  p.fill(2);
  ema.update();
  const std::vector<float> weights = p.values, average = copy_of(ema.views()[0]);
  ema.swap_in();
  EXPECT_TRUE(ema.swapped());
  EXPECT_EQ(p.values, average);
  ema.swap_out();
  EXPECT_FALSE(ema.swapped());
  EXPECT_EQ(p.values, weights);
  EXPECT_EQ(copy_of(ema.views()[0]), average);
}

TEST(Average, SwapOfOtherDtypesIsExactBothWays) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    std::vector<uint64_t> memory(64), before;
    std::mt19937_64 random(7);
    for (uint64_t& word : memory)
      word = dtype == DType::kF64 ? std::bit_cast<uint64_t>(static_cast<double>(random()) * 1e-19) : random() & 0x3fff3fff3fff3fffu;
    const Region region = Region::whole({64});
    const TensorView view{"p", dtype, region, memory.data()};
    Average ema(std::vector{view}, with_decay(0.5));
    for (uint64_t& word : memory)
      word = dtype == DType::kF64 ? std::bit_cast<uint64_t>(static_cast<double>(random()) * 1e-19) : random() & 0x3fff3fff3fff3fffu;
    ema.update();
    before = memory;
    const std::vector<float> average = copy_of(ema.views()[0]);
    ema.swap_in();
    EXPECT_NE(memory, before);
    ema.swap_out();
    EXPECT_EQ(memory, before);
    EXPECT_EQ(copy_of(ema.views()[0]), average);
  }
}

TEST(Average, HoldsNonFiniteElementsAndCountsThem) {
  Owned p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  const std::vector<float> start = p.values;
  p.fill(2);
  p.values[3] = std::numeric_limits<float>::quiet_NaN();
  p.values[9] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(ema.update().non_finite, 2);
  const std::vector<float> average = copy_of(ema.views()[0]);
  EXPECT_EQ(average[3], start[3]);
  EXPECT_EQ(average[9], start[9]);
  EXPECT_NE(average[4], start[4]);
  EXPECT_EQ(ema.stats().held_non_finite, 2);
}

TEST(Average, RemembersTheFirstUpdateThatHeldAnything) {
  Owned p("first", {kRows}, 1), q("second", {kRows}, 2);
  Average ema(std::vector{p.view, q.view}, with_decay(0.9));
  ema.update();
  EXPECT_FALSE(ema.non_finite());
  q.values[5] = q.values[6] = std::numeric_limits<float>::infinity();
  ema.update(4);
  p.values[0] = std::numeric_limits<float>::quiet_NaN();
  ema.update(5);
  ASSERT_TRUE(ema.non_finite());
  EXPECT_EQ(ema.non_finite()->step, 4);
  EXPECT_EQ(ema.non_finite()->elements, 2);
  EXPECT_EQ(ema.non_finite()->tensor, "second");
  ema.forget_non_finite();
  EXPECT_FALSE(ema.non_finite());
  ema.update(6);
  EXPECT_EQ(ema.non_finite()->tensor, "first");
  EXPECT_EQ(ema.stats().held_non_finite, 8);
}

TEST(Average, RaisesForNonFiniteElementsNamingTheTensor) {
  Owned p("first", {kRows}, 1), q("second", {kRows}, 2);
  AverageOptions options = with_decay(0.9);
  options.non_finite = NonFinite::kRaise;
  Average ema(std::vector{p.view, q.view}, options);
  q.values[0] = std::numeric_limits<float>::infinity();
  EXPECT_NE(message_of([&] { ema.update(); }, Code::kInvalidArgument).find("'second'"), std::string::npos);
}

TEST(Average, ResumesBitIdentically) {
  Owned p("p", {kRows}, 1);
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

TEST(Average, BindsParametersThatMoved) {
  Owned p("p", {kRows}, 1), moved("p", {kRows}, 2);
  Average ema(std::vector{p.view}, with_decay(0.9));
  std::vector<float> expected = p.values;
  ema.update(std::vector{moved.view});
  lerp(expected, moved.values, 1 - 0.9);
  EXPECT_EQ(copy_of(ema.views()[0]), expected);
}

/// A column shard, so that rounding by elements has jumps.
Region columns() {
  return Region::grid({kRows, kColumns}, {{{0, kRows}}, {{2, 7}}});
}

TEST(Average, ABindThatFindsNoMemoryChangesNothing) {
  const Owned start("p", columns(), 1);
  for (const double decay : {0.9, 0.99999}) {
    long refused = 0;
    for (bool failed = true; failed; ++refused) {
      Owned p("p", columns(), 1), moved("p", columns(), 2);
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

TEST(Average, AStateThatFindsNoMemoryChangesNothing) {
  Owned p("p", columns(), 1);
  Average other(std::vector{p.view}, {.schedules = {Schedule::constant(0.99999)}, .rounding = Rounding::kStochastic, .seed = 5});
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
  const AverageOptions theirs{.schedules = {Schedule::constant(0.99999)},
                              .rule = Rule::kLerp,
                              .rounding = Rounding::kStochastic,
                              .update_every = 2,
                              .start_step = 1,
                              .seed = 9};
  const AverageOptions ours{.schedules = {Schedule::half_life(10)}, .rule = Rule::kMulAdd, .rounding = Rounding::kNearest, .seed = 3};
  for (const OptionsFrom from : {OptionsFrom::kFile, OptionsFrom::kOwn}) {
    Owned p("p", columns(), 1);
    Average saved(std::vector{p.view}, theirs), resumed(std::vector{p.view}, ours);
    Average straight(std::vector{p.view}, from == OptionsFrom::kFile ? theirs : ours);
    saved.update(4);
    straight.update(4);
    std::copy_n(static_cast<float*>(saved.views()[0].data), columns().size(), static_cast<float*>(resumed.views()[0].data));
    std::copy_n(static_cast<float*>(saved.views()[0].data), columns().size(), static_cast<float*>(straight.views()[0].data));
    resumed.set_state(saved.state(), from);
    EXPECT_EQ(resumed.state(), straight.state());
    p.fill(2);
    resumed.update(6);
    straight.update(6);
    EXPECT_EQ(copy_of(resumed.views()[0]), copy_of(straight.views()[0]));
  }
}

TEST(Average, TellsWhichOptionsDifferFromAState) {
  Owned p("p", {kRows}, 1);
  Average two(std::vector{p.view}, {.schedules = {Schedule::constant(0.9), Schedule::mean()}, .rule = Rule::kMulAdd, .seed = 9});
  Average own(std::vector{p.view}, {.schedules = {Schedule::constant(0.9), Schedule::power(0.1)}, .dtype = DType::kF64, .update_every = 3});
  std::vector<std::string> names;
  for (const OptionDifference& one : own.differences(two.state())) names.push_back(one.name);
  EXPECT_EQ(names, (std::vector<std::string>{"schedule/1", "rule", "update_every", "seed", "dtype"}));
  EXPECT_EQ(own.differences(two.state())[2].file, "1");
  EXPECT_EQ(own.differences(two.state())[2].own, "3");
  EXPECT_TRUE(two.differences(two.state()).empty());
  EXPECT_TRUE(own.differences(Average(std::vector{p.view}).state()).size() > 1);
}

TEST(Average, OptionsOfAFileMustFitTheMemoryHere) {
  Owned p("p", {kRows}, 1);
  Average nearest(std::vector{p.view}, {.rounding = Rounding::kNearest});
  Average narrow(std::vector{p.view}, {.dtype = DType::kBF16});
  const std::string before = narrow.state();
  EXPECT_NE(message_of([&] { narrow.set_state(nearest.state()); }, Code::kInvalidArgument).find("own options"), std::string::npos);
  EXPECT_EQ(narrow.state(), before);
  narrow.set_state(nearest.state(), OptionsFrom::kOwn);
}

TEST(Average, RefusesCountersThatNoAverageHas) {
  Owned p("p", {kRows}, 1);
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

TEST(Average, RefusesFactorsAndSamplesThatAreNoNumbers) {
  Owned p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  const std::vector<float> start = p.values;
  p.fill(2);
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const Factors factors : {Factors{nan, 0.1}, Factors{0.9, nan}, Factors{infinity, -infinity}}) {
    EXPECT_NE(message_of([&] { ema.update_by({&factors, 1}); }, Code::kInvalidArgument).find("average 0"), std::string::npos);
  }
  for (const double samples : {nan, infinity, -1.0}) message_of([&] { ema.update(std::nullopt, samples); }, Code::kInvalidArgument);
  EXPECT_EQ(copy_of(ema.views()[0]), start);
  EXPECT_EQ(ema.stats().step, 0);
}

TEST(Average, ReplicasDivideTheWorkAndSwapWhole) {
  constexpr int kMost = 8;
  for (int ranks = 1; ranks <= kMost; ++ranks) {
    Owned start("p", {kRows, kColumns}, 1), dense_p("p", {kRows, kColumns}, 1);
    Average dense(std::vector{dense_p.view}, with_decay(0.9));
    dense_p.fill(2);
    dense.update();
    auto groups = threads(ranks);
    std::vector<std::unique_ptr<Owned>> local;
    for (int rank = 0; rank < ranks; ++rank) local.push_back(std::make_unique<Owned>("p", Shape{kRows, kColumns}, 1));
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

TEST(Average, WrongUseIsAClearErrorBeforeAnythingChanges) {
  Owned p("p", {kRows}, 1), other("other", {kRows}, 1), shorter("p", {kRows - 1}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  const std::vector<float> start = copy_of(ema.views()[0]);
  TensorView narrow = p.view;
  narrow.dtype = DType::kBF16;
  const struct {
    std::function<void()> call;
    const char* says;
  } cases[] = {
      {[&] { ema.update(std::vector{other.view}); }, "'other'"},
      {[&] { ema.update(std::vector{shorter.view}); }, "region"},
      {[&] { ema.update(std::vector{narrow}); }, "BF16"},
      {[&] { ema.update(std::vector<TensorView>{}); }, "0 parameters"},
      {[&] { ema.update(0); }, "step 0"},
      {[&] { ema.swap_in(1); }, "1 averages"},
      {[&] {
         Average(std::vector{p.view, p.view});
       },
       "two parameters"},
      {[&] { Average(std::vector{p.view}, {.schedules = {}}); }, "0 schedules"},
      {[&] { Average(std::vector{p.view}, {.update_every = 0}); }, "update_every"},
      {[&] { Average(std::vector{p.view}, {.dtype = DType::kBF16, .rounding = Rounding::kNearest}); }, "BF16"},
      {[&] { Average(std::vector{p.view}, {.rule = Rule::kMulAdd, .rounding = Rounding::kStochastic}); }, "lerp"},
      {[&] { Average(std::vector{p.view}, {.dtype = DType::kI32}); }, "I32"},
  };
  for (const auto& [call, says] : cases) EXPECT_NE(message_of(call, Code::kInvalidArgument).find(says), std::string::npos) << says;
  EXPECT_EQ(copy_of(ema.views()[0]), start);
  EXPECT_EQ(ema.stats().step, 0);
}

TEST(Average, IsNotUpdatedOrReadWhileSwapped) {
  Owned p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  ema.swap_in();
  message_of([&] { ema.update(); }, Code::kInvalidArgument);
  message_of([&] { (void)ema.views(); }, Code::kInvalidArgument);
  message_of([&] { ema.reset(); }, Code::kInvalidArgument);
  message_of([&] { ema.set_state(ema.state()); }, Code::kInvalidArgument);
}

TEST(Average, RefusesAStateThatDoesNotFit) {
  Owned p("p", {kRows}, 1);
  Average one(std::vector{p.view}), two(std::vector{p.view}, {.schedules = {Schedule::constant(0.9), Schedule::constant(0.99)}});
  message_of([&] { one.set_state(two.state()); }, Code::kInvalidArgument);
  message_of([&] { one.set_state("{}"); }, Code::kCorrupt);
  message_of([&] { one.set_state("not json"); }, Code::kCorrupt);
}

TEST(Average, CudaViewsAreRefusedWhereNoDeviceAnswers) {
  if (kernels::cuda::available()) GTEST_SKIP() << "a CUDA device is here: cuda_test covers it";
  const TensorView view{"p", DType::kF32, Region::whole({4}), nullptr, {Device::Kind::kCuda, 0, nullptr}};
  std::vector<float> memory(4);
  TensorView somewhere = view;
  somewhere.data = memory.data();  // never read: the device is asked first
  message_of([&] { Average(std::vector{somewhere}); }, Code::kUnsupported);
}

}  // namespace
}  // namespace shardow
