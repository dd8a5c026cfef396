// Schedule: how much of the old average survives each update. Formulas and sources: docs/schedules.md.
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

struct Progress {
  int64_t step = 1;  ///< this one, counted from start_step
  int64_t updates = 0;
  int64_t delta = 1;  ///< steps since the last applied one
  double samples = 0;
  double delta_samples = 0;
};

/// e <- decay e + weight p, with weight 1 - decay in full precision.
struct Factors {
  double decay, weight;
};

class Schedule {
 public:
  // d is the decay of step n, w = 1 - d.

  static Schedule constant(double decay);

  static Schedule settable(double decay);  ///< as Average::set_decay() says; one of an Average

  static Schedule half_life(double steps);               ///< d = 2^(-1 / steps)
  static Schedule half_life_in_samples(double samples);  ///< update() must be told samples

  static Schedule warmup(double decay);  ///< d = min(decay, (1 + n) / (10 + n))

  static Schedule power(double sigma_rel);  ///< EDM2's, of (0, 0.28]: arXiv 2312.02696

  static Schedule mean();                               ///< w = 1 / (updates + 1): SWA
  static Schedule debiased(double decay);               ///< w = (1 - decay) / (1 - decay^n)
  static Schedule window(int64_t first, int64_t last);  ///< the mean of these steps

  static Schedule linear(double from, double to, int64_t steps);
  static Schedule cosine(double from, double to, int64_t steps);  ///< BYOL, DINO

  static Schedule half_life_fraction(double fraction, double max_steps);  ///< half-life min(max_steps, fraction n)

  /// k-diffusion's EMAWarmup: 1 - (1 + (n - 1 - start) / inv_gamma)^-power.
  static Schedule inverse_gamma(double inv_gamma, double power, double min_decay = 0, double max_decay = 1,
                                double start = 0);

  // Other projects', off-by-ones included.

  static Schedule tf_warmup(double decay);
  static Schedule timm(double decay, double min_decay = 0, int64_t update_after_step = 0, bool use_warmup = false,
                       double gamma = 1, double power = 2.0 / 3);
  static Schedule dist_ema(double decay, bool warmup = false, double power = 2.0 / 3, double min_decay = 0,
                           double inv_gamma = 1, int64_t update_after_step = 0);
  static Schedule diffusers(double decay, double min_decay = 0, int64_t update_after_step = 0,
                            bool use_ema_warmup = false, double inv_gamma = 1, double power = 2.0 / 3);
  static Schedule ema_pytorch(double beta = 0.9999, int64_t update_after_step = 100, double inv_gamma = 1,
                              double power = 2.0 / 3, double min_value = 0);

  std::string key() const;  ///< in file names: "0.9999", "power(sigma_rel=0.1)"

  Factors factors(const Progress& progress) const;

  std::string to_json() const;
  static Schedule from_json(std::string_view json);

  bool operator==(const Schedule&) const = default;

 private:
  friend struct average::Schedules;
  Schedule(size_t kind, std::vector<double> numbers) : kind_(kind), numbers_(std::move(numbers)) {}

  size_t kind_;
  std::vector<double> numbers_;
};

}  // namespace shardow
#pragma GCC visibility pop
