// Formulas keep the order of operations of the upstream projects: in float64 they are equal to them bit for bit.
// python/tests/schedules runs each project's own code beside them.
#include "average/schedule_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "average/log_sum.h"
#include "base/errors.h"

namespace shardow::average {
namespace {

using In = std::span<const double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Range kFraction{0, 1};
constexpr Range kPositive{0, kInfinity, false, true};
constexpr Range kCount{0, 9007199254740992.0, true};
constexpr Range kSteps{1, 9007199254740992.0, true};
constexpr Range kFlag{0, 1, true};

// Numbers that several kinds have.
constexpr Parameter kDecay{"decay", kFraction}, kMinDecay{"min_decay", kFraction, 0};
constexpr Parameter kInvGamma{"inv_gamma", kPositive, 1}, kPower{"power", kPositive, 2.0 / 3};
constexpr Parameter kAfterStep{"update_after_step", kCount, 0};

double crowson(double m, double inv_gamma, double power) {
  return 1 - std::pow(1 + m / inv_gamma, -power);
}

Factors one_step(double decay) {
  return {decay, 1 - decay};
}

Factors from_log(double log_decay) {
  return {std::exp(log_decay), -std::expm1(log_decay)};
}

Factors constant(In x, const Progress& progress) {
  if (progress.delta == 1) return one_step(x[0]);
  return from_log(static_cast<double>(progress.delta) * std::log(x[0]));
}

Factors half_life(double elapsed, double half) {
  return from_log(-std::numbers::ln2 * (elapsed / half));
}

Factors half_life_in_steps(In x, const Progress& progress) {
  return half_life(static_cast<double>(progress.delta), x[0]);
}

Factors half_life_in_samples(In x, const Progress& progress) {
  if (!(progress.delta_samples > 0)) {
    base::fail(Code::kInvalidArgument,
               "a half-life in samples needs update(samples=), the training samples seen so far, and more of them at "
               "every update; got {} after {}",
               progress.samples, progress.samples - progress.delta_samples);
  }
  return half_life(progress.delta_samples, x[0]);
}

Factors half_life_fraction(In x, const Progress& progress) {
  const auto half = [&](double n) { return std::max(std::min(x[1], x[0] * n), 1e-8); };
  if (progress.delta == 1) return half_life(1, half(static_cast<double>(progress.step)));
  return from_log(sum_of_logs(progress.step - progress.delta + 1, progress.step,
                              [&](double n) { return -std::numbers::ln2 / half(n); }));
}

double inverse_gamma(In x, double n) {
  const double epoch = std::max(0.0, (n - 1) - x[4]);
  return std::min(x[3], std::max(x[2], crowson(epoch, x[0], x[1])));
}

double warmup(In x, double n) {
  return std::min(x[0], (1 + n) / (10 + n));
}

double tf_warmup(In x, double n) {
  return std::min(x[0], n / (9 + n));
}

double timm(In x, double n) {
  const double m = n - x[2] - 1;
  if (m <= 0) return 0.0;
  return x[3] == 0 ? x[0] : std::max(std::min(crowson(m, x[4], x[5]), x[0]), x[1]);
}

double dist_ema(In x, double n) {
  if (x[1] == 0) return x[0];
  const double m = std::max(0.0, (n - 1) - x[5] - 1);
  return std::max(x[3], std::min(crowson(m, x[4], x[2]), x[0]));
}

double diffusers(In x, double n) {
  const double m = n - x[2] - 1;
  if (m <= 0) return 0.0;
  return std::max(std::min(x[3] != 0 ? crowson(m, x[4], x[5]) : (1 + m) / (10 + m), x[0]), x[1]);
}

double ema_pytorch(In x, double n) {
  const double m = n - x[1] - 1;
  return m <= 0 ? 0.0 : std::min(std::max(crowson(m, x[2], x[3]), x[4]), x[0]);
}

/// Returns 0 at step 1, and 1 from step `steps` on.
double ramp(double n, double steps) {
  return steps <= 1 ? 1 : std::min(1.0, (n - 1) / (steps - 1));
}

double linear(In x, double n) {
  return x[0] + (x[1] - x[0]) * ramp(n, x[2]);
}

double cosine(In x, double n) {
  return x[1] - (x[1] - x[0]) * (std::cos(std::numbers::pi * ramp(n, x[2])) + 1) / 2;
}

Factors mean(In, const Progress& progress) {
  const double count = static_cast<double>(progress.updates) + 1;
  return {1 - 1 / count, 1 / count};
}

/// Computes the number of earlier updates in the window from the distance between them, so that no state is needed.
Factors window(In x, const Progress& progress) {
  const auto n = static_cast<double>(progress.step);
  if (n < x[0]) return {0, 1};
  if (n > x[1]) return {1, 0};
  const double count = std::floor((n - x[0]) / static_cast<double>(progress.delta)) + 1;
  return {1 - 1 / count, 1 / count};
}

Factors power(In x, const Progress& progress) {
  const double t = static_cast<double>(progress.step), delta = static_cast<double>(progress.delta);
  thread_local std::pair<double, double> last{0,
                                              0};  // sigma_rel and its gamma, which is the same for millions of steps
  if (last.first != x[0]) last = {x[0], power_gamma(x[0])};
  const double exponent = last.second + 1;
  return {std::pow(1 - delta / t, exponent), -std::expm1(exponent * std::log1p(-delta / t))};
}

Factors debiased(In x, const Progress& progress) {
  const double d = x[0], n = static_cast<double>(progress.step), delta = static_cast<double>(progress.delta);
  if (d == 1) return {1 - delta / n, delta / n};  // the limit: a mean over the steps
  const double weight = std::expm1(delta * std::log(d)) / std::expm1(n * std::log(d));
  return {1 - weight, weight};
}

}  // namespace

/// Applies Newton's method from above to a polynomial that is convex there, so that it falls to the largest root.
double power_gamma(double sigma_rel) {
  const double s = 1 / (sigma_rel * sigma_rel);
  double g = std::max(s, 4.0);
  for (int i = 0; i < 200; ++i) {
    const double value = ((g + 7) * g + (16 - s)) * g + (12 - s), slope = (3 * g + 14) * g + (16 - s);
    const double next = g - value / slope;
    if (next == g) break;
    g = next;
  }
  return g;
}

Factors Kind::factors(std::span<const double> numbers, const Progress& progress) const {
  if (const auto* const of_update = std::get_if<OfUpdate>(&formula)) return (*of_update)(numbers, progress);
  const auto decay = [&](double n) { return std::get<OfStep>(formula)(numbers, n); };
  if (progress.delta == 1) return one_step(decay(static_cast<double>(progress.step)));
  return from_log(
      sum_of_logs(progress.step - progress.delta + 1, progress.step, [&](double n) { return std::log(decay(n)); }));
}

std::span<const Kind> schedule_table() {
  static const std::vector<Kind> table = {
      {"constant", {kDecay}, constant},
      {"settable", {kDecay}, constant, /*rising=*/false, /*settable=*/true},
      {"half_life", {{"steps", kPositive}}, half_life_in_steps},
      {"half_life_in_samples", {{"samples", kPositive}}, half_life_in_samples},
      {"half_life_fraction", {{"fraction", kPositive}, {"max_steps", kPositive, kInfinity}}, half_life_fraction},
      {"inverse_gamma",
       {kInvGamma, {"power", kPositive, 1}, kMinDecay, {"max_decay", kFraction, 1}, {"start", kCount, 0}},
       inverse_gamma},
      {"warmup", {kDecay}, warmup},
      {"tf_warmup", {kDecay}, tf_warmup},
      {"timm", {kDecay, kMinDecay, kAfterStep, {"use_warmup", kFlag, 0}, {"gamma", kPositive, 1}, kPower}, timm},
      {"dist_ema", {kDecay, {"warmup", kFlag, 0}, kPower, kMinDecay, kInvGamma, kAfterStep}, dist_ema},
      {"diffusers", {kDecay, kMinDecay, kAfterStep, {"use_ema_warmup", kFlag, 0}, kInvGamma, kPower}, diffusers},
      {"ema_pytorch",
       {{"beta", kFraction, 0.9999},
        {"update_after_step", kCount, 100},
        kInvGamma,
        kPower,
        {"min_value", kFraction, 0}},
       ema_pytorch},
      {"linear", {{"from", kFraction}, {"to", kFraction}, {"steps", kSteps}}, linear},
      {"cosine", {{"from", kFraction}, {"to", kFraction}, {"steps", kSteps}}, cosine},
      {"mean", {}, mean},
      {"power", {{"sigma_rel", {0, 0.28, false, true}}}, power},
      {"debiased", {kDecay}, debiased},
      {"window", {{"first", kSteps}, {"last", kSteps}}, window, /*rising=*/true},
  };
  return table;
}

}  // namespace shardow::average
