// Schedule: how much of the old average survives each update.
//
// A schedule is a value: a kind with its numbers. factors() is a pure function of where training stands, computed in float64; the kernels
// round its results once. Equal JSON means equal behaviour, now and after a resume. Thread-safe, as values are.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)
namespace shardow {

/// Where training stands when an average is due.
struct Progress {
  int64_t step = 1;          ///< optimizer steps since averaging began, this one included: 1 at the first update (after start_step)
  int64_t updates = 0;       ///< averages applied before this one
  int64_t delta = 1;         ///< steps since the last applied update; 1 unless update_every > 1 or steps were skipped. Above `step`: `step`
  double samples = 0;        ///< training samples seen, this step's included; 0 if the caller does not say
  double delta_samples = 0;  ///< samples since the last applied update
};

/// The two weights of one update, e <- decay e + weight p. Both are kept: for one step weight = 1 - decay, as every origin computes it; for
/// n steps decay = d^n and weight = -expm1(n ln d), where 1 - decay would lose digits.
struct Factors {
  double decay;
  double weight;
};

class Schedule {
 public:
  using Numbers = std::map<std::string, double, std::less<>>;

  /// n is Progress::step throughout. Numbers out of range are kInvalidArgument, naming the number and its range.
  /// Over delta > 1 steps at once the decays of the steps are multiplied, so that an average made every k-th step follows the same curve.

  /// d = decay, in [0, 1].
  static Schedule constant(double decay);

  /// The old average halves in `steps` steps (or samples, which update() must then be told): d = 2^(-delta / H).
  static Schedule half_life(double steps);
  static Schedule half_life_in_samples(double samples);

  /// H = min(max_steps, fraction n), d = 2^(-1 / H): the ramp-up of the traditional EMA in EDM2 (Karras et al., arXiv 2312.02696; 0.09
  /// there).
  static Schedule half_life_fraction(double fraction, double max_steps);

  /// m = n - 1 - start; m < 0: 0, else d = clamp(1 - (1 + m / inv_gamma)^-power, min_decay, max_decay): k-diffusion's EMAWarmup (K.
  /// Crowson).
  static Schedule inverse_gamma(double inv_gamma, double power, double min_decay = 0, double max_decay = 1, double start = 0);

  /// d = min(decay, (1 + n) / (10 + n)): torch-ema with use_num_updates, which counts before it uses.
  static Schedule warmup(double decay);
  /// The same with n - 1: tf.train.ExponentialMovingAverage whose num_updates is a global step not yet increased.
  static Schedule tf_warmup(double decay);

  /// timm ModelEmaV3.get_decay(step = n): m = n - update_after_step - 1; m <= 0: 0; use_warmup: clamp(1 - (1 + m / gamma)^-power) into
  /// [min_decay, decay]; else decay.
  static Schedule timm(double decay, double min_decay = 0, int64_t update_after_step = 0, bool use_warmup = false, double gamma = 1,
                       double power = 2.0 / 3);

  /// DistEMA: m = max(0, n - 1 - update_after_step - 1), since it counts after it uses: d = max(min_decay, min(1 - (1 + m /
  /// inv_gamma)^-power, decay)); without warmup: decay.
  static Schedule dist_ema(double decay, bool warmup = false, double power = 2.0 / 3, double min_decay = 0, double inv_gamma = 1,
                           int64_t update_after_step = 0);

  /// diffusers EMAModel.get_decay(n): m = n - update_after_step - 1; m <= 0: 0; warm-up 1 - (1 + m / inv_gamma)^-power or (1 + m) / (10 +
  /// m), into [min_decay, decay].
  static Schedule diffusers(double decay, double min_decay = 0, int64_t update_after_step = 0, bool use_ema_warmup = false,
                            double inv_gamma = 1, double power = 2.0 / 3);

  /// ema-pytorch EMA.get_current_decay() at its n-th update(): m = n - update_after_step - 1; m <= 0: 0, else 1 - (1 + m /
  /// inv_gamma)^-power in [min_value, beta]. The origin computes in float32; this is within one float32 rounding of it.
  static Schedule ema_pytorch(double beta = 0.9999, int64_t update_after_step = 100, double inv_gamma = 1, double power = 2.0 / 3,
                              double min_value = 0);

  /// From `from` at step 1 to `to` at step `steps` and after: in a straight line, or on half a cosine, d = to - (to - from) (cos(pi m) + 1)
  /// / 2 (BYOL, DINO).
  static Schedule linear(double from, double to, int64_t steps);
  static Schedule cosine(double from, double to, int64_t steps);

  /// Equal weights: w = 1 / (updates + 1) (SWA; torch.optim.swa_utils.get_swa_avg_fn). Counts updates, not steps.
  static Schedule mean();

  /// Power-function profile: d = (1 - delta / n)^(gamma + 1), gamma the largest root of sigma^-2 = (g+2)^2 (g+3) / (g+1) (EDM2, eq. 121
  /// ff.); sigma_rel in (0, 0.28].
  static Schedule power(double sigma_rel);

  /// Adam's debiased mean as one lerp: w = (1 - d) / (1 - d^n).
  static Schedule debiased(double decay);

  /// The plain mean of the weights at the updates of steps first to last, 1 <= first <= last, held afterwards; before `first` it copies
  /// them. w = 1 / (floor((n - first) / delta) + 1): updates at uneven distances count for the steps since the one before.
  static Schedule window(int64_t first, int64_t last);

  /// Any of these by name, as in JSON; numbers that are left out have their defaults.
  static Schedule make(std::string_view kind, const Numbers& numbers);
  static std::vector<std::string_view> kinds();

  /// {"kind":"constant","decay":0.9999}; a number that is infinite is left out. from_json() throws kCorrupt for anything else.
  static Schedule from_json(std::string_view json);
  std::string to_json() const;

  /// Throws kInvalidArgument where the schedule needs samples and the caller gives none.
  Factors factors(const Progress& progress) const;

  /// What an average with this schedule is called, in state dicts, statistics and file names: "0.9999" for a constant decay, else its kind
  /// and numbers, "power(sigma_rel=0.1)". Numbers are the shortest that give the same float64 again, as in to_json(). Equal schedules
  /// alone have equal keys.
  std::string key() const;

  bool operator==(const Schedule&) const = default;

 private:
  Schedule(size_t kind, std::vector<double> numbers) : kind_(kind), numbers_(std::move(numbers)) {}

  size_t kind_;                  // row of the table of kinds
  std::vector<double> numbers_;  // in the order of the row's parameters
};

}  // namespace shardow
#pragma GCC visibility pop
