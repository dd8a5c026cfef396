// What an Average computes, and how; formulas: docs/cpp_reference.md.
#pragma once

#include <chrono>

#include "shardow/schedule.h"
#include "shardow/tensor_view.h"

#pragma GCC visibility push(default)
namespace shardow {

class Group;  // group.h

/// How it is computed, bit for bit as in:
enum class Rule {
  kLerp,             ///< torch.lerp: the accurate one
  kMulAdd,           ///< mul_().add_(): biased for long decays
  kTwoProducts,      ///< timm's ModelEma
  kDifference,       ///< torch-ema, diffusers
  kFusedDifference,  ///< diffusers with foreach
  kQuotient,         ///< torch's SWA
};

/// kStochastic keeps the small increments of long decays; kAuto takes it for 16-bit averages, and for kF32 where 1 -
/// decay < 5e-5.
enum class Rounding { kAuto, kNearest, kStochastic };

/// NaN or Inf in a weight.
enum class NonFinite {
  kHold,  ///< that element's average stays
  kPropagate,
  kRaise,  ///< as kHold, then throws, after the update
};

struct AverageOptions {
  // What is computed: the same on all ranks.
  std::vector<Schedule> schedules = {Schedule::constant(0.9999)};  ///< 1 to 8: an average of each
  DType dtype = DType::kF32;                                       ///< kF32, kF64, kBF16 or kF16
  Rule rule = Rule::kLerp;
  Rounding rounding = Rounding::kAuto;
  NonFinite non_finite = NonFinite::kHold;
  int64_t update_every = 1;  ///< steps, by the product of their decays
  int64_t start_step = 0;    ///< up to it averages are copies
  uint64_t seed = 0;         ///< of stochastic rounding
  bool keep_values = false;  ///< begin with the caller's averages

  // How: changes no numbers.
  int num_threads = 0;                      ///< 0: by OMP_NUM_THREADS and affinity
  bool overlap = false;                     ///< update() in the background, of weights on the host
  int64_t ring_bytes = int64_t{128} << 20;  ///< pinned, for averages on the host of CUDA weights

  /// Borrowed: ranks with the same views, in host memory. Each averages a part; swaps are collective.
  Group* replicas = nullptr;
  std::chrono::milliseconds timeout{600'000};  ///< of swaps
};

}  // namespace shardow
#pragma GCC visibility pop
