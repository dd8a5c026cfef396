// An update costs nothing beside its kernel: no allocation and no lock. Locks are counted in pthread_mutex_lock(), but
// not under sanitizers, which replace it. Names are longer than what a string keeps in itself, so that a copy of one is
// an allocation.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <limits>
#include <mutex>

#include "average/average_fixture.h"
#include "base/allocations_fixture.h"
#include "shardow/average.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SHARDOW_COUNTS_LOCKS 0
#else
#define SHARDOW_COUNTS_LOCKS 1
#endif

namespace {
std::atomic<long> locks_taken = 0;
}

#if SHARDOW_COUNTS_LOCKS
extern "C" __attribute__((visibility("default"))) int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static const auto next = reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  locks_taken.fetch_add(1, std::memory_order_relaxed);
  return next(mutex);
}
#endif

namespace shardow {
namespace {

struct Model {
  std::vector<OwnTensor> owned;
  std::vector<TensorView> views;

  /// Small, or with one tensor that is averaged by several threads.
  explicit Model(bool large) {
    for (int i = 0; i < 2000; ++i)
      owned.emplace_back("model.blocks." + std::to_string(i) + ".attention.weight",
                         Shape{large && i == 7 ? 3'000'000 : 16}, 1u);
    for (const OwnTensor& tensor : owned) views.push_back(tensor.view);
  }
};

template <typename Fn>
std::pair<long, long> allocations_and_locks_of(Fn&& fn) {
  const long before = locks_taken.load();
  const long allocations = base::allocations_of(fn);
  return {allocations, locks_taken.load() - before};
}

constexpr std::pair<long, long> kNothing = {0, 0};

TEST(Costs, AreCounted) {
  std::mutex mutex;
  const std::string name = "model.blocks.1.attention.weight";
  const auto [allocations, locks] = allocations_and_locks_of([&] {
    const std::lock_guard lock(mutex);
    EXPECT_FALSE(std::string(name).empty());
  });
  EXPECT_EQ(allocations, 1);
  EXPECT_EQ(locks, SHARDOW_COUNTS_LOCKS);
}

TEST(Costs, OfAnUpdateAreThoseOfTheKernelAfterTheFirst) {
  for (const bool large : {false, true}) {
    for (const double decay : {0.9, 0.99999}) {  // lerp, stochastic rounding
      const Model model(large);
      Average ema(model.views, {.schedules = {Schedule::constant(decay), Schedule::warmup(0.5)}, .num_threads = 2});
      ema.update(model.views);
      EXPECT_EQ(allocations_and_locks_of([&] { ema.update(); }), kNothing) << decay;
      EXPECT_EQ(allocations_and_locks_of([&] { ema.update(model.views); }), kNothing) << decay;
      EXPECT_EQ(allocations_and_locks_of([&] { ema.bind(model.views); }), kNothing) << decay;
      const Factors factors[] = {{0.5, 0.5}, {0.25, 0.75}};
      EXPECT_EQ(allocations_and_locks_of([&] { ema.update_by(factors); }), kNothing) << decay;
      EXPECT_EQ(ema.stats().updates, 4);
    }
  }
}

/// Covers rules, dtypes, schedules, skipped steps and elements that are held.
TEST(Costs, OfAnUpdateAreThoseOfTheKernelWithEveryOption) {
  std::vector<AverageOptions> all;
  for (const Rule rule :
       {Rule::kMulAdd, Rule::kTwoProducts, Rule::kDifference, Rule::kFusedDifference, Rule::kQuotient})
    all.push_back({.rule = rule});
  for (const DType dtype : {DType::kF64, DType::kBF16, DType::kF16}) all.push_back({.dtype = dtype});
  for (const NonFinite non_finite : {NonFinite::kPropagate, NonFinite::kRaise})
    all.push_back({.non_finite = non_finite});
  all.push_back({.update_every = 3});
  all.push_back({.start_step = 2});
  for (const Schedule& schedule :
       {Schedule::half_life(100), Schedule::half_life_in_samples(100), Schedule::half_life_fraction(0.09, 50),
        Schedule::inverse_gamma(1, 0.5), Schedule::tf_warmup(0.9), Schedule::timm(0.9), Schedule::dist_ema(0.9),
        Schedule::diffusers(0.9), Schedule::ema_pytorch(), Schedule::linear(0.5, 0.9, 7), Schedule::cosine(0.5, 0.9, 7),
        Schedule::mean(), Schedule::power(0.1), Schedule::debiased(0.9), Schedule::window(2, 5)}) {
    all.push_back({.schedules = {schedule}});
  }
  std::vector<OwnTensor> owned;
  std::vector<TensorView> views;
  for (int i = 0; i < 5; ++i)
    owned.emplace_back("model.blocks." + std::to_string(i) + ".attention.weight", columns(), 1u);
  owned[2].values[0] = std::numeric_limits<float>::infinity();
  for (const OwnTensor& tensor : owned) views.push_back(tensor.view);
  for (const AverageOptions& options : all) {
    const bool raises = options.non_finite == NonFinite::kRaise;
    if (raises) owned[2].values[0] = 0;
    Average ema(views, options);
    ema.update(views, std::nullopt, 10);
    const auto costs = allocations_and_locks_of([&] {
      for (int step = 2; step <= 8; ++step) ema.update(views, std::nullopt, 10.0 * step);
    });
    EXPECT_EQ(costs, kNothing) << ema.state();
    if (raises) owned[2].values[0] = std::numeric_limits<float>::infinity();
  }
}

}  // namespace
}  // namespace shardow
