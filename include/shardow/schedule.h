// Schedule: how much of the old average survives each update.
//
//   Schedule::constant(0.9999)      Schedule::half_life(10'000)      Schedule::warmup(0.9999)
//
// A value: a kind with its numbers. factors() is a pure function of where training stands. Equal JSON means equal behaviour, now and after
// a resume.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)
namespace shardow {

namespace average {
struct [[gnu::visibility("hidden")]] Schedules;  // src/average/schedule_table.h
}

/// Where an optimizer step stands. Average::progress() gives that of the next one.
struct Progress {
  int64_t step = 1;          ///< optimizer steps since averaging began, this one included: those after AverageOptions::start_step
  int64_t updates = 0;       ///< averages applied before this step
  int64_t delta = 1;         ///< steps since the last applied update; 1 unless update_every > 1 or steps were skipped. At most `step`
  double samples = 0;        ///< training samples seen, this step's included; 0 if the caller does not say
  double delta_samples = 0;  ///< samples since the last applied update
};

/// The two weights of one update, e <- decay e + weight p. For one step weight = 1 - decay; for n steps decay = d^n and weight =
/// -expm1(n ln d), where 1 - decay would lose digits.
struct Factors {
  double decay;
  double weight;
};

class Schedule {
 public:
  // d is the decay of one step, w = 1 - d, n is Progress::step. Where delta > 1 the decays of these steps are multiplied, so that an
  // average made every k-th step follows the same curve. A number out of range is kInvalidArgument.

  static Schedule constant(double decay);  ///< d = decay, in [0, 1]

  /// The old average halves in `steps` steps: d = 2^(-1 / steps). Or in `samples` training samples, which update() must then be told.
  static Schedule half_life(double steps);
  static Schedule half_life_in_samples(double samples);

  static Schedule warmup(double decay);  ///< d = min(decay, (1 + n) / (10 + n)): torch-ema with use_num_updates

  /// Power-function profile of relative width sigma_rel, in (0, 0.28]: d = (1 - 1/n)^(gamma + 1), gamma the largest root of sigma_rel^-2 =
  /// (g+2)^2 (g+3) / (g+1) (EDM2: Karras et al., arXiv 2312.02696, eq. 121 ff.).
  static Schedule power(double sigma_rel);

  static Schedule mean();                               ///< of all updates so far: w = 1 / (updates + 1) (SWA). Counts updates, not steps
  static Schedule debiased(double decay);               ///< Adam's debiased mean: w = (1 - decay) / (1 - decay^n)
  static Schedule window(int64_t first, int64_t last);  ///< the plain mean of steps first to last, held afterwards; a copy before

  /// From `from` at step 1 to `to` at step `steps` and after: in a straight line, or on half a cosine, d = to - (to - from) (cos(pi m) + 1)
  /// / 2 (BYOL, DINO).
  static Schedule linear(double from, double to, int64_t steps);
  static Schedule cosine(double from, double to, int64_t steps);

  /// A half-life of min(max_steps, fraction n): EDM2's traditional EMA, with 0.09.
  static Schedule half_life_fraction(double fraction, double max_steps);

  /// m = n - 1 - start; d = 1 - (1 + m / inv_gamma)^-power in [min_decay, max_decay], 0 where m < 0: k-diffusion's EMAWarmup.
  static Schedule inverse_gamma(double inv_gamma, double power, double min_decay = 0, double max_decay = 1, double start = 0);

  // For runs that go on from another project's class, with its off-by-ones; docs/schedules.md has the formulas.

  static Schedule tf_warmup(double decay);  ///< tf.train.ExponentialMovingAverage, num_updates a global step not yet increased: n - 1
  static Schedule timm(double decay, double min_decay = 0, int64_t update_after_step = 0, bool use_warmup = false, double gamma = 1,
                       double power = 2.0 / 3);  ///< ModelEmaV3.get_decay(n)
  static Schedule dist_ema(double decay, bool warmup = false, double power = 2.0 / 3, double min_decay = 0, double inv_gamma = 1,
                           int64_t update_after_step = 0);
  static Schedule diffusers(double decay, double min_decay = 0, int64_t update_after_step = 0, bool use_ema_warmup = false,
                            double inv_gamma = 1, double power = 2.0 / 3);  ///< EMAModel.get_decay(n)
  static Schedule ema_pytorch(double beta = 0.9999, int64_t update_after_step = 100, double inv_gamma = 1, double power = 2.0 / 3,
                              double min_value = 0);  ///< its n-th update(), within one float32 rounding

  /// What an average with this schedule is called, in state dicts, statistics and (ema_file_name()) files: "0.9999" for a constant decay,
  /// else its kind and numbers, "power(sigma_rel=0.1)". Equal schedules alone have equal keys.
  std::string key() const;

  /// Throws kInvalidArgument where the schedule needs samples and the caller gives none.
  Factors factors(const Progress& progress) const;

  /// {"kind":"constant","decay":0.9999}: the function's name and its numbers, but for infinite ones. from_json() gives those that are not
  /// there their defaults, and throws kCorrupt for anything else.
  std::string to_json() const;
  static Schedule from_json(std::string_view json);

  bool operator==(const Schedule&) const = default;

 private:
  friend struct average::Schedules;
  Schedule(size_t kind, std::vector<double> numbers) : kind_(kind), numbers_(std::move(numbers)) {}

  size_t kind_;                  // row of the table of kinds
  std::vector<double> numbers_;  // in the order of the row's parameters
};

}  // namespace shardow
#pragma GCC visibility pop
