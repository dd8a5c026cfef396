// Updates of averages in float32 beside their limit, the same stream of loads and stores with one max in place of the
// average. The two take turns within each benchmark, and what counts is `of_limit`, the ratio of their speeds. On a
// busy machine: --benchmark_repetitions=9
// --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/row.h"
#include "roofline.h"

namespace shardow::kernels {
namespace {

struct Free {
  void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
};
using Memory = std::unique_ptr<std::byte, Free>;

Memory allocate(int64_t elements, size_t size) {
  return Memory(static_cast<std::byte*>(::operator new (static_cast<size_t>(elements) * size, std::align_val_t{64})));
}

template <class T>
void fill(std::byte* memory, int64_t count) {
  std::minstd_rand random(1);
  for (int64_t i = 0; i < count; ++i)
    reinterpret_cast<T*>(memory)[i] = convert<T>(std::uniform_real_distribution(-1.0f, 1.0f)(random));
}

constexpr int64_t kChunk = 65536;

/// A model's parameters, each at its own address, and arenas of averages, as the average layer lays them out.
template <class P>
struct Model {
  Model(const std::vector<int64_t>& tensors, int num_averages) {
    int64_t total = 0;
    for (const int64_t count : tensors) total += (count + 15) / 16 * 16;
    parameters = allocate(total, sizeof(P));
    fill<P>(parameters.get(), total);
    for (int k = 0; k < num_averages; ++k) {
      averages.push_back(allocate(total, sizeof(float)));
      fill<float>(averages.back().get(), total);
    }
    int64_t begin = 0;
    for (const int64_t count : tensors) {
      for (int64_t i = 0; i < count; i += kChunk) add_chunk(begin + i, std::min(kChunk, count - i));
      begin += (count + 15) / 16 * 16;
      elements += count;
    }
    bytes = elements * static_cast<int64_t>(sizeof(P) + 2 * sizeof(float) * static_cast<size_t>(num_averages));
  }

  void add_chunk(int64_t begin, int64_t count) {
    Chunk chunk{};
    chunk.parameter = reinterpret_cast<P*>(parameters.get()) + begin;
    for (size_t k = 0; k < averages.size(); ++k)
      chunk.averages[k] = reinterpret_cast<float*>(averages[k].get()) + begin;
    chunk.count = count;
    chunk.parameter_dtype = std::is_same_v<P, BF16> ? DType::kBF16 : DType::kF32;
    chunk.average_dtype = DType::kF32;
    chunks.push_back(chunk);
  }

  Memory parameters;
  std::vector<Memory> averages;
  std::vector<Chunk> chunks;
  int64_t elements = 0, bytes = 0;
};

/// Not a power of two: arenas a power of two and a page apart are aliases in the first-level cache of some processors.
std::vector<int64_t> one_large() {
  return std::vector<int64_t>(30, 1000001);
}

std::vector<int64_t> many_small() {
  std::mt19937 random(1);
  std::vector<int64_t> tensors(2000);
  for (int64_t& count : tensors) count = std::uniform_int_distribution(64, 2000)(random);
  return tensors;
}

/// Of this thread's own processor time, which waits for memory but not for other programs.
double seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Times the update; `of_limit` is the median of the ratios of its speed to that of the limit run just before it, over
/// the same memory.
template <class P>
void update(benchmark::State& state, const std::vector<int64_t>& tensors, int num_averages, Form form) {
  const Model<P> model(tensors, num_averages);
  Step step{};
  step.num_averages = num_averages;
  step.hold = true;
  step.averages.fill({form, 1 - 1e-4, 1e-4});
  std::vector<double> ratios;
  for (auto _ : state) {
    ++step.step;
    const double begin = seconds();
    roofline::update(model.chunks, num_averages);
    const double middle = seconds();
    benchmark::DoNotOptimize(cpu::update(model.chunks, step));
    const double end = seconds();
    state.SetIterationTime(end - middle);
    ratios.push_back((middle - begin) / (end - middle));
  }
  std::nth_element(ratios.begin(), ratios.begin() + static_cast<std::ptrdiff_t>(ratios.size() / 2), ratios.end());
  state.counters["of_limit"] = ratios[ratios.size() / 2];
  state.SetBytesProcessed(state.iterations() * model.bytes);
}

void update_f32(benchmark::State& state, const std::vector<int64_t>& tensors, int num_averages, Form form) {
  update<float>(state, tensors, num_averages, form);
}
void update_bf16(benchmark::State& state, const std::vector<int64_t>& tensors, int num_averages, Form form) {
  update<BF16>(state, tensors, num_averages, form);
}

BENCHMARK_CAPTURE(update_f32, one_average, one_large(), 1, Form::kLerp)->UseManualTime();
BENCHMARK_CAPTURE(update_f32, one_average_stochastic, one_large(), 1, Form::kStochastic)->UseManualTime();
BENCHMARK_CAPTURE(update_f32, four_averages, one_large(), 4, Form::kLerp)->UseManualTime();
BENCHMARK_CAPTURE(update_f32, many_small, many_small(), 1, Form::kLerp)->UseManualTime();
BENCHMARK_CAPTURE(update_f32, many_small_stochastic, many_small(), 1, Form::kStochastic)->UseManualTime();
BENCHMARK_CAPTURE(update_bf16, one_average, one_large(), 1, Form::kLerp)->UseManualTime();
BENCHMARK_CAPTURE(update_bf16, one_average_stochastic, one_large(), 1, Form::kStochastic)->UseManualTime();
BENCHMARK_CAPTURE(update_bf16, four_averages, one_large(), 4, Form::kLerp)->UseManualTime();
BENCHMARK_CAPTURE(update_bf16, four_averages_stochastic, one_large(), 4, Form::kStochastic)->UseManualTime();

}  // namespace
}  // namespace shardow::kernels
