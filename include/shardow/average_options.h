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

/// How the new average is computed; bit for bit as the named origin does.
enum class Rule {
  kLerp,             ///< fma(w, p - e, e), for w >= 1/2 fma(w - 1, p - e, p): torch.lerp, the accurate one
  kMulAdd,           ///< fma(p, 1-d, round(e d)): mul_().add_(), biased for long decays
  kTwoProducts,      ///< round(e d) + round(p (1-d)): timm's ModelEma
  kDifference,       ///< e - round(w (e - p)): torch-ema, diffusers
  kFusedDifference,  ///< fma(w, p - e, e) for every w: diffusers with foreach
  kQuotient,         ///< e + round((p - e) / D), D = 1 / w, a whole number where that is near one: torch's SWA
};

/// How the result is rounded to the averages' dtype. Weights of any of these dtypes go with averages of any; they are converted first.
///
///   averages     computed in  kAuto                                            kNearest  kStochastic
///   kF32         float        to nearest; kLerp with w < 5e-5: stochastically  yes       kLerp, where w < 1/2
///   kF64         double       to nearest                                       yes       refused
///   kBF16, kF16  float        kLerp alone, stochastically                      refused   as kAuto
///
/// To nearest, the increments of a long decay are lost; stochastically, their mean is right. In 16 bits that leaves 0.2 to 1.6 % of noise,
/// a function of (seed, step, name, which average, index in the global tensor). Copies of weights (at the start, decay 0) are rounded to
/// nearest. docs/numerics.md: how far each is from exact.
enum class Rounding { kAuto, kNearest, kStochastic };

/// What a NaN or Inf in a weight does to its average.
enum class NonFinite {
  kHold,       ///< that element keeps its average and is counted
  kPropagate,  ///< ordinary arithmetic
  kRaise,      ///< as kHold, and then kInvalidArgument with the first tensor's name: after the update is made and counted, so ranks
               ///< stay in step. Go on with the next step, or load
};

struct AverageOptions {
  // What is computed: the same on all ranks.
  /// An average of each, all in one pass; 1 to 8, unequal where they are saved.
  std::vector<Schedule> schedules = {Schedule::constant(0.9999)};
  DType dtype = DType::kF32;  ///< of the averages: kF32, kF64, kBF16 or kF16
  Rule rule = Rule::kLerp;
  Rounding rounding = Rounding::kAuto;
  NonFinite non_finite = NonFinite::kHold;

  /// Steps up to `start_step` copy the weights; then every `update_every`-th step averages, by the product of the decays of all steps since
  /// the last one. With constant(0.9), update_every = 3, start_step = 2: steps 1 and 2 copy; 5, 8, 11, ... keep 0.9^3; the rest do nothing.
  /// Where no step up to start_step > 0 was seen, the first one after it copies.
  int64_t update_every = 1;
  int64_t start_step = 0;
  uint64_t seed = 0;         ///< of stochastic rounding
  bool keep_values = false;  ///< begin with what the averages' memory holds, not with the weights

  // How: no number depends on it.

  /// Of this Average; 0: what OMP_NUM_THREADS and the affinity mask allow, and 1 with `overlap` of weights on the host. Where ranks are
  /// threads of one process, give each its share.
  int num_threads = 0;
  bool overlap = false;  ///< weights on the host: update() returns when its work has begun; call finish_reading() before they are written
  int64_t ring_bytes = int64_t{128} << 20;  ///< pinned memory, in all, through which weights on devices reach averages on the host

  /// Ranks that hold the same views, in host memory: each averages 1/size() of every view. Not needed: without it each averages all.
  Group* replicas = nullptr;
  std::chrono::milliseconds timeout{600'000};  ///< of a swap's messages among `replicas`
};

}  // namespace shardow
#pragma GCC visibility pop
