// What an Average computes, and how.
//
//   Average two(views, {.schedules = {Schedule::constant(0.999), Schedule::power(0.1)}, .update_every = 10});
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "shardow/schedule.h"
#include "shardow/tensor_view.h"

#pragma GCC visibility push(default)
namespace shardow {

class Group;  // group.h

/// How average e takes in weight p, w = 1 - d; bit for bit as in its origin.
enum class Rule {
  kLerp,             ///< fma(w, p - e, e), for w >= 1/2 fma(w - 1, p - e, p): torch.lerp, the accurate one
  kMulAdd,           ///< fma(p, 1-d, round(e d)): mul_().add_(), biased for long decays
  kTwoProducts,      ///< round(e d) + round(p (1-d)): timm's ModelEma
  kDifference,       ///< e - round(w (e - p)): torch-ema, diffusers
  kFusedDifference,  ///< fma(w, p - e, e) for every w: diffusers with foreach
  kQuotient,         ///< e + round((p - e) / D), D = 1 / w, whole where nearly so: torch's SWA
};

/// How results are rounded to the averages' dtype. kStochastic keeps the small increments of long decays, with noise that no topology
/// changes. kAuto: for 16-bit averages, and kF32 where w < 5e-5 (docs/numerics.md).
enum class Rounding { kAuto, kNearest, kStochastic };

/// What a NaN or Inf in a weight does to its average.
enum class NonFinite {
  kHold,       ///< that element keeps its average and is counted
  kPropagate,  ///< ordinary arithmetic
  kRaise,      ///< as kHold, then throws; the update is made and counted
};

struct AverageOptions {
  // What is computed: the same on all ranks.
  std::vector<Schedule> schedules = {Schedule::constant(0.9999)};  ///< 1 to 8: an average of each, in one pass
  DType dtype = DType::kF32;                                       ///< kF32, kF64, kBF16 or kF16; weights have any of these
  Rule rule = Rule::kLerp;
  Rounding rounding = Rounding::kAuto;
  NonFinite non_finite = NonFinite::kHold;
  int64_t update_every = 1;  ///< average every n-th step, by the product of n decays
  int64_t start_step = 0;    ///< copy the weights up to this step
  uint64_t seed = 0;         ///< of stochastic rounding
  bool keep_values = false;  ///< averages begin as the caller's memory holds them

  // How: no number depends on it.
  int num_threads = 0;                      ///< 0: by OMP_NUM_THREADS and affinity
  bool overlap = false;                     ///< of weights on the host: update() works in the background
  int64_t ring_bytes = int64_t{128} << 20;  ///< pinned memory, for averages on the host of weights on devices

  /// Borrowed: ranks with the same views, in host memory. Each averages 1/size() of them; swaps are collective.
  Group* replicas = nullptr;
  std::chrono::milliseconds timeout{600'000};  ///< of their swaps
};

}  // namespace shardow
#pragma GCC visibility pop
