// What it costs to tell an Average where the parameters are, step after step, when nothing has moved: 2,000 views with
// names as long as those of models. `cold`: after a training step has pushed everything out of the caches near the
// core.
#include <benchmark/benchmark.h>

#include <ctime>
#include <string>
#include <vector>

#include "shardow/average.h"

namespace shardow {
namespace {

struct Model {
  std::vector<float> memory = std::vector<float>(2000 * 64);
  std::vector<TensorView> views;

  Model() {
    for (int64_t i = 0; i < 2000; ++i) {
      views.push_back(
          {"model.blocks." + std::to_string(i / 10) + ".attention.projection." + std::to_string(i % 10) + ".weight",
           DType::kF32, Region::grid({128, 64}, {{{i % 128, i % 128 + 1}}, {{0, 64}}}), memory.data() + i * 64});
    }
  }
};

double seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// The very views that the averages were made with.
void bind_same(benchmark::State& state) {
  Model model;
  Average ema(model.views);
  for (auto _ : state) ema.bind(model.views);
}

/// Views that a program made anew: equal, with memory of their own.
void bind_equal(benchmark::State& state) {
  Model model;
  Average ema(model.views);
  std::vector<TensorView> again = Model().views;
  for (size_t i = 0; i < again.size(); ++i) again[i].data = model.views[i].data;
  for (auto _ : state) ema.bind(again);
}

/// Views that a program makes for each step.
void bind_fresh(benchmark::State& state) {
  Model model;
  Average ema(model.views);
  for (auto _ : state) {
    std::vector<TensorView> fresh = Model().views;
    for (size_t i = 0; i < fresh.size(); ++i) fresh[i].data = model.views[i].data;
    const double begin = seconds();
    ema.bind(fresh);
    state.SetIterationTime(seconds() - begin);
  }
}

void bind_cold(benchmark::State& state) {
  Model model;
  Average ema(model.views);
  std::vector<char> other(size_t{64} << 20);
  for (auto _ : state) {
    for (size_t i = 0; i < other.size(); i += 64) ++other[i];
    benchmark::DoNotOptimize(other.data());
    const double begin = seconds();
    ema.bind(model.views);
    state.SetIterationTime(seconds() - begin);
  }
}

BENCHMARK(bind_same)->Unit(benchmark::kMicrosecond);
BENCHMARK(bind_equal)->Unit(benchmark::kMicrosecond);
BENCHMARK(bind_fresh)->Unit(benchmark::kMicrosecond)->UseManualTime()->Iterations(300);
BENCHMARK(bind_cold)->Unit(benchmark::kMicrosecond)->UseManualTime()->Iterations(100);

}  // namespace
}  // namespace shardow
