// Schedule: how much of the old average survives each update. Formulas and sources: docs/schedules.md.
#pragma once

#include <cstdint>
#include <initializer_list>
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

  static Schedule constant(double decay) { return of("constant", decay); }

  /// As Average::set_decay() says; one of an Average.
  static Schedule settable(double decay) { return of("settable", decay); }

  /// d = 2^(-1 / steps)
  static Schedule half_life(double steps) { return of("half_life", steps); }
  /// `update()` must be told samples.
  static Schedule half_life_in_samples(double samples) { return of("half_life_in_samples", samples); }

  /// d = min(decay, (1 + n) / (10 + n))
  static Schedule warmup(double decay) { return of("warmup", decay); }

  /// EDM2's, of (0, 0.28]: arXiv 2312.02696
  static Schedule power(double sigma_rel) { return of("power", sigma_rel); }

  /// w = 1 / (updates + 1): SWA
  static Schedule mean() { return of("mean"); }
  /// w = (1 - decay) / (1 - decay^n)
  static Schedule debiased(double decay) { return of("debiased", decay); }
  /// The mean of these steps.
  static Schedule window(int64_t first, int64_t last) { return of("window", first, last); }

  static Schedule linear(double from, double to, int64_t steps) { return of("linear", from, to, steps); }
  /// BYOL, DINO
  static Schedule cosine(double from, double to, int64_t steps) { return of("cosine", from, to, steps); }

  /// Half-life min(max_steps, fraction n).
  static Schedule half_life_fraction(double fraction, double max_steps) {
    return of("half_life_fraction", fraction, max_steps);
  }

  /// k-diffusion's EMAWarmup: 1 - (1 + (n - 1 - start) / inv_gamma)^-power.
  static Schedule inverse_gamma(double inv_gamma, double power, double min_decay = 0, double max_decay = 1,
                                double start = 0) {
    return of("inverse_gamma", inv_gamma, power, min_decay, max_decay, start);
  }

  // Other projects', off-by-ones included.

  static Schedule tf_warmup(double decay) { return of("tf_warmup", decay); }
  static Schedule timm(double decay, double min_decay = 0, int64_t update_after_step = 0, bool use_warmup = false,
                       double gamma = 1, double power = 2.0 / 3) {
    return of("timm", decay, min_decay, update_after_step, use_warmup, gamma, power);
  }
  static Schedule dist_ema(double decay, bool warmup = false, double power = 2.0 / 3, double min_decay = 0,
                           double inv_gamma = 1, int64_t update_after_step = 0) {
    return of("dist_ema", decay, warmup, power, min_decay, inv_gamma, update_after_step);
  }
  static Schedule diffusers(double decay, double min_decay = 0, int64_t update_after_step = 0,
                            bool use_ema_warmup = false, double inv_gamma = 1, double power = 2.0 / 3) {
    return of("diffusers", decay, min_decay, update_after_step, use_ema_warmup, inv_gamma, power);
  }
  static Schedule ema_pytorch(double beta = 0.9999, int64_t update_after_step = 100, double inv_gamma = 1,
                              double power = 2.0 / 3, double min_value = 0) {
    return of("ema_pytorch", beta, update_after_step, inv_gamma, power, min_value);
  }

  std::string key() const;  ///< in file names: "0.9999", "power(sigma_rel=0.1)"

  Factors factors(const Progress& progress) const;

  std::string to_json() const;
  static Schedule from_json(std::string_view json);

  bool operator==(const Schedule&) const = default;

 private:
  friend struct average::Schedules;
  template <class... Numbers>
  static Schedule of(std::string_view kind, Numbers... numbers) {
    return in_order(kind, {static_cast<double>(numbers)...});
  }
  static Schedule in_order(std::string_view kind, std::initializer_list<double> numbers);
  Schedule(size_t kind, std::vector<double> numbers) : kind_(kind), numbers_(std::move(numbers)) {}

  size_t kind_;
  std::vector<double> numbers_;
};

}  // namespace shardow
#pragma GCC visibility pop
