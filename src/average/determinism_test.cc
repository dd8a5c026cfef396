// Averages are the same on any number of threads, in any floating-point environment, for any topology.
#include <cfenv>
#include <functional>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "average/average_fixture.h"
#include "base/allocations_fixture.h"
#include "shardow/average.h"

namespace shardow {
namespace {

TEST(Average, TheSameWithOneThreadOrMany) {
  OwnTensor p("p", {3, 1 << 20}, 1);
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

/// Returns weights of every magnitude, subnormal ones too, so many that several threads share them.
std::vector<float> of_every_magnitude(uint32_t seed) {
  OwnTensor p("p", {1, 1 << 20}, seed);
  for (size_t i = 0; i < p.values.size(); ++i) p.values[i] = std::ldexp(p.values[i], -static_cast<int>(i % 150));
  return p.values;
}

/// Returns the weights inside each swap and after it, following construction and an update, all in the floating-point
/// environment that `set` makes.
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
  std::vector<std::pair<const char*, std::function<void()>>> cases = {
      {"upward", [] { std::fesetround(FE_UPWARD); }}, {"towards zero", [] { std::fesetround(FE_TOWARDZERO); }}};
#if defined(__x86_64__)
  cases.emplace_back("flush to zero", [] { _mm_setcsr(_mm_getcsr() | 0x8040); });
#endif
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    const auto expected = numbers_after([] {}, 1, dtype);
    for (const auto& [name, set] : cases) {
      for (const int threads : {1, 3})
        EXPECT_TRUE(numbers_after(set, threads, dtype) == expected) << name << " " << threads;
    }
  }
}

TEST(Average, TheEnvironmentOfTheCallerIsBackAfterwards) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  p.values[0] = std::numeric_limits<float>::infinity();
  std::fesetround(FE_DOWNWARD);
  std::feclearexcept(FE_ALL_EXCEPT);
  ema.update(2);
  EXPECT_EQ(std::fegetround(), FE_DOWNWARD);
  EXPECT_EQ(std::fetestexcept(FE_INVALID), 0);
  std::fesetround(FE_TONEAREST);
}

/// Returns the averages of ranks that hold `regions`, as one global tensor.
std::vector<float> averaged_globally(const Shape& shape, const std::vector<Region>& regions,
                                     const std::vector<float>& before, const std::vector<float>& after,
                                     AverageOptions options) {
  std::vector<float> result(before.size());
  for (const Region& region : regions) {
    OwnTensor local("p", region, 0);
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
    region.for_each_run([&](const shardow::Run& run) {
      std::copy_n(average.begin() + run.local_begin, run.length, result.begin() + run.global_begin);
    });
  }
  EXPECT_EQ(shape, regions[0].shape());
  return result;
}

TEST(Average, TopologyNeverChangesTheNumbers) {
  const Shape shape = {kRows, kColumns};
  const OwnTensor before("p", shape, 1), after("p", shape, 2);
  std::vector<std::vector<Region>> cuts = {{Region::whole(shape)}};
  for (int ranks = 2; ranks <= 8; ++ranks) {
    std::vector<Region> flat, columns;
    for (int rank = 0; rank < ranks; ++rank) {
      flat.push_back(Region::whole(shape).part(rank, ranks, 1));
      columns.push_back(
          Region::grid(shape, {{{0, kRows}}, {{kColumns * rank / ranks, kColumns * (rank + 1) / ranks}}}));
    }
    cuts.push_back(flat);
    cuts.push_back(columns);
  }
  for (const double decay : {0.9, 0.99999}) {  // the second rounds stochastically
    const auto whole = averaged_globally(shape, cuts[0], before.values, after.values, with_decay(decay));
    for (const auto& cut : cuts)
      EXPECT_EQ(averaged_globally(shape, cut, before.values, after.values, with_decay(decay)), whole) << decay;
  }
}

TEST(Average, NoiseNeedsNoTableOfRuns) {
  const Region region = Region::grid({1 << 15, 8}, {{{0, 1 << 15}}, {{3, 7}}});  // 32,768 runs of 4
  OwnTensor p("p", region, 1);
  Average ema(std::vector{p.view}, {.schedules = {Schedule::constant(0.99999)}, .num_threads = 2});
  const int64_t before = ema.stats().table_bytes;
  EXPECT_LT(before, 1024);
  EXPECT_EQ(base::allocations_of([&] { ema.update(); }), 0);
  EXPECT_EQ(ema.stats().table_bytes, before);
}

TEST(Average, NoiseIsOfTheElementOnBothSidesOfAMultipleOf2To32) {
  const Region all = Region::whole({1 << 17, 1 << 16});
  constexpr int64_t kMiddle = int64_t{1} << 32, kHalf = 100;
  OwnTensor both("p", all.window(kMiddle - kHalf, kMiddle + kHalf), 1);
  OwnTensor before("p", all.window(kMiddle - kHalf, kMiddle), 1), after("p", all.window(kMiddle, kMiddle + kHalf), 1);
  const auto averaged = [](OwnTensor& tensor, std::span<const float> start, std::span<const float> then) {
    std::copy(start.begin(), start.end(), tensor.values.begin());
    Average ema(std::vector{tensor.view}, {.schedules = {Schedule::constant(0.99999)}});
    std::copy(then.begin(), then.end(), tensor.values.begin());
    ema.update();
    return copy_of(ema.views()[0]);
  };
  const std::vector<float> start = both.values;
  both.fill(2);
  const std::vector<float> then = both.values;
  const std::span<const float> first(start), second(then);
  std::vector<float> parts = averaged(before, first.first(kHalf), second.first(kHalf));
  const std::vector<float> rest = averaged(after, first.last(kHalf), second.last(kHalf));
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(averaged(both, first, second), parts);
}

TEST(Average, NoiseIsOfTheElementInLargeShardsOnManyThreads) {
  const Shape shape = {3, 1 << 11, 700};
  OwnTensor whole("p", shape, 1);
  const Region part = Region::grid(shape, {{{0, 3}}, {{0, 1 << 11}}, {{40, 340}}}).window(77, 1'800'000);
  OwnTensor local("p", part, 0);
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
  const std::vector<float> expected = copy_of(all.views()[0]), shard = copy_of(some.views()[0]);
  bool equal = true;
  part.for_each_run([&](const shardow::Run& run) {
    equal = equal && std::equal(shard.begin() + run.local_begin, shard.begin() + run.local_begin + run.length,
                                expected.begin() + run.global_begin);
  });
  EXPECT_TRUE(equal);
}

}  // namespace
}  // namespace shardow
