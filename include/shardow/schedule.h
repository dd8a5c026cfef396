// Schedule: how much of the old average survives each update.
//
//   Schedule::constant(0.9999)      Schedule::half_life(10'000)      Schedule::warmup(0.9999)
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)
namespace shardow {

namespace average {
struct [[gnu::visibility("hidden")]] Schedules;
}

/// Where an optimizer step stands.
struct Progress {
  int64_t step = 1;          ///< counted from AverageOptions::start_step, this one included
  int64_t updates = 0;       ///< applied before
  int64_t delta = 1;         ///< steps since the last applied update
  double samples = 0;        ///< training samples seen; 0: not told
  double delta_samples = 0;  ///< since the last applied update
};

/// e <- decay e + weight p; weight is 1 - decay, for n steps -expm1(n ln d).
struct Factors {
  double decay, weight;
};

class Schedule {
 public:
  // d is the decay of one step, w = 1 - d, n is Progress::step.

  static Schedule constant(double decay);  ///< d = decay, in [0, 1]

  static Schedule half_life(double steps);               ///< d = 2^(-1 / steps)
  static Schedule half_life_in_samples(double samples);  ///< update() must be told samples

  static Schedule warmup(double decay);  ///< d = min(decay, (1 + n) / (10 + n)): torch-ema with use_num_updates

  /// d = (1 - 1/n)^(gamma + 1), gamma the largest root of sigma_rel^-2 = (g+2)^2 (g+3) / (g+1); sigma_rel in (0, 0.28] (EDM2, arXiv
  /// 2312.02696).
  static Schedule power(double sigma_rel);

  static Schedule mean();                               ///< w = 1 / (updates + 1): SWA
  static Schedule debiased(double decay);               ///< w = (1 - decay) / (1 - decay^n): Adam's
  static Schedule window(int64_t first, int64_t last);  ///< the mean of these steps, then held; a copy before

  static Schedule linear(double from, double to, int64_t steps);  ///< from step 1 to `steps`, then `to`
  static Schedule cosine(double from, double to, int64_t steps);  ///< on half a cosine: BYOL, DINO

  static Schedule half_life_fraction(double fraction, double max_steps);  ///< half-life min(max_steps, fraction n): EDM2, with 0.09

  /// m = n - 1 - start; d = 1 - (1 + m / inv_gamma)^-power in [min_decay, max_decay], 0 where m < 0: k-diffusion's EMAWarmup.
  static Schedule inverse_gamma(double inv_gamma, double power, double min_decay = 0, double max_decay = 1, double start = 0);

  // Other projects', with their off-by-ones: docs/schedules.md.

  static Schedule tf_warmup(double decay);
  static Schedule timm(double decay, double min_decay = 0, int64_t update_after_step = 0, bool use_warmup = false, double gamma = 1,
                       double power = 2.0 / 3);
  static Schedule dist_ema(double decay, bool warmup = false, double power = 2.0 / 3, double min_decay = 0, double inv_gamma = 1,
                           int64_t update_after_step = 0);
  static Schedule diffusers(double decay, double min_decay = 0, int64_t update_after_step = 0, bool use_ema_warmup = false,
                            double inv_gamma = 1, double power = 2.0 / 3);
  static Schedule ema_pytorch(double beta = 0.9999, int64_t update_after_step = 100, double inv_gamma = 1, double power = 2.0 / 3,
                              double min_value = 0);

  std::string key() const;  ///< its name in files: "0.9999", "power(sigma_rel=0.1)"

  Factors factors(const Progress& progress) const;  ///< throws where it needs samples and has none

  std::string to_json() const;                       ///< {"kind":"constant","decay":0.9999}
  static Schedule from_json(std::string_view json);  ///< throws kCorrupt

  bool operator==(const Schedule&) const = default;

 private:
  friend struct average::Schedules;
  Schedule(size_t kind, std::vector<double> numbers) : kind_(kind), numbers_(std::move(numbers)) {}

  size_t kind_;
  std::vector<double> numbers_;
};

}  // namespace shardow
#pragma GCC visibility pop
