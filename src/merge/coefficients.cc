// The formulas of docs/merging.md. Each interval's mean of a curve is written so that nothing cancels where an interval
// is short.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <numeric>
#include <utility>

#include "base/errors.h"
#include "merge/rules.h"

namespace shardow {
namespace {

using base::fail;

constexpr std::pair<std::string_view, DecayCurve> kCurves[] = {{"linear", DecayCurve::kLinear},
                                                               {"cosine", DecayCurve::kCosine},
                                                               {"inv-sqrt", DecayCurve::kInvSqrt},
                                                               {"1-sqrt", DecayCurve::kOneMinusSqrt}};

std::string_view name_of(DecayCurve curve) {
  if (static_cast<size_t>(curve) >= std::size(kCurves))
    fail(Code::kInvalidArgument, "DecayCurve: {} is none", static_cast<int>(curve));
  return kCurves[static_cast<size_t>(curve)].first;
}

void check_inputs(size_t inputs) {
  if (inputs == 0) fail(Code::kInvalidArgument, "nothing to merge: no inputs");
}

void check_decay(double decay) {
  if (!(decay >= 0 && decay < 1)) fail(Code::kInvalidArgument, "decay {}: it must be at least 0 and below 1", decay);
}

void check_ascending(std::span<const int64_t> steps) {
  check_inputs(steps.size());
  for (const int64_t step : steps) check_step(step);
  for (size_t j = 1; j < steps.size(); ++j) {
    if (steps[j] <= steps[j - 1])
      fail(Code::kInvalidArgument, "step {} after step {}: steps must ascend, each of them once", steps[j],
           steps[j - 1]);
  }
}

/// By interval, of steps s_0 < s_1 < ... as doubles.
std::vector<double> interval_means(DecayCurve curve, const std::vector<double>& s) {
  std::vector<double> means;
  const double first = s.front(), last = s.back(), length = last - first;
  for (size_t j = 1; j < s.size(); ++j) {
    const double a = (s[j - 1] - first) / length, b = (s[j] - first) / length;
    double mean = 0;
    switch (curve) {
      case DecayCurve::kLinear: mean = ((last - s[j - 1]) / length + (last - s[j]) / length) / 2; break;
      case DecayCurve::kCosine: {  // sin(pi b) - sin(pi a) as a product
        const double half = std::numbers::pi * (s[j] - s[j - 1]) / length / 2;
        mean = (1 + std::cos(std::numbers::pi * (a + b) / 2) * std::sin(half) / half) / 2;
        break;
      }
      case DecayCurve::kInvSqrt: mean = 2 * std::sqrt(first) / (std::sqrt(s[j - 1]) + std::sqrt(s[j])); break;
      case DecayCurve::kOneMinusSqrt:
        mean = 1 - (a + std::sqrt(a * b) + b) / (std::sqrt(a) + std::sqrt(b)) * 2 / 3;
        break;
    }
    means.push_back(mean);
  }
  return means;
}

/// c_0 = 1 - f_1, c_j = f_j - f_{j+1}, c_n = f_n.
std::vector<double> differences(const std::vector<double>& means) {
  std::vector<double> c;
  c.reserve(means.size() + 1);
  double before = 1;
  for (const double mean : means) c.push_back(std::exchange(before, mean) - mean);
  c.push_back(before);
  return c;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

/// f_j = sum of c_i from j on: the learning rate, in parts of its peak, that coefficients imply for interval j.
std::vector<double> implied_rates(const std::vector<double>& c) {
  std::vector<double> rates(c.size() - 1);
  double sum = 0;
  for (size_t j = c.size() - 1; j > 0; --j) rates[j - 1] = sum += c[j];
  return rates;
}

std::vector<double> ema_at(std::span<const double> steps, double decay) {
  const double log = std::log(decay);
  std::vector<double> c;
  for (size_t j = 0; j < steps.size(); ++j) {
    const double kept = std::pow(decay, steps.back() - steps[j]);
    c.push_back(j == 0 ? kept : -std::expm1((steps[j] - steps[j - 1]) * log) * kept);
  }
  return c;
}

/// As many, at equal distances, from the first to the last.
std::vector<double> evenly(const std::vector<double>& steps) {
  std::vector<double> even = steps;
  const double n = static_cast<double>(steps.size()) - 1;
  for (size_t j = 1; j + 1 < steps.size(); ++j)
    even[j] = steps.front() + (steps.back() - steps.front()) * static_cast<double>(j) / n;
  return even;
}

}  // namespace

void check_step(int64_t step) {
  constexpr int64_t kMost = int64_t{1} << 53;  // beyond, float64 has no longer every whole number
  if (step < 0 || step > kMost) fail(Code::kInvalidArgument, "step {}: steps are 0 to 2^53 = {}", step, kMost);
}

std::optional<DecayCurve> find_decay_curve(std::string_view name) noexcept {
  for (const auto& [text, curve] : kCurves) {
    if (text == name) return curve;
  }
  return std::nullopt;
}

Coefficients uniform_coefficients(size_t inputs) {
  check_inputs(inputs);
  return {std::vector<double>(inputs, 1.0 / static_cast<double>(inputs)), "uniform"};
}

Coefficients given_coefficients(std::vector<double> weights, bool normalize) {
  check_inputs(weights.size());
  for (const double weight : weights) {
    if (!std::isfinite(weight)) fail(Code::kInvalidArgument, "weight {}: it must be a finite number", weight);
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (!normalize) return {std::move(weights), fmt::format("weights (sum {})", sum)};
  if (sum == 0 || !std::isfinite(1 / sum))
    fail(Code::kInvalidArgument, "weights with the sum {} can't be normalized", sum);
  for (double& weight : weights) weight /= sum;
  return {std::move(weights), fmt::format("weights (normalized from the sum {})", sum)};
}

Coefficients ema_coefficients(size_t inputs, double decay) {
  check_inputs(inputs);
  check_decay(decay);
  std::vector<double> index(inputs);
  std::iota(index.begin(), index.end(), 0.0);
  return {ema_at(index, decay), fmt::format("ema (decay {} an input)", decay)};
}

Coefficients ema_coefficients(std::span<const int64_t> steps, double decay) {
  check_ascending(steps);
  check_decay(decay);
  const std::vector<double> s(steps.begin(), steps.end());
  Coefficients found{ema_at(s, decay), fmt::format("ema (decay {} a step)", decay)};
  found.index_error = largest_difference(implied_rates(found.values), implied_rates(ema_at(evenly(s), decay)));
  return found;
}

Coefficients lawa_coefficients(size_t inputs, size_t last) {
  check_inputs(inputs);
  if (last == 0 || last > inputs)
    fail(Code::kInvalidArgument, "the last {} of {} inputs: it must be 1 to {}", last, inputs, inputs);
  std::vector<double> c(inputs, 0.0);
  std::fill(c.end() - static_cast<std::ptrdiff_t>(last), c.end(), 1.0 / static_cast<double>(last));
  return {std::move(c), fmt::format("lawa (last {})", last)};
}

Coefficients decay_coefficients(DecayCurve curve, std::span<const int64_t> steps) {
  check_ascending(steps);
  if (steps.size() < 2)
    fail(Code::kInvalidArgument,
         "a decay curve goes from one input to another: two or more are needed, and 1 is given");
  if (curve == DecayCurve::kInvSqrt && steps[0] <= 0)
    fail(Code::kInvalidArgument,
         "curve inv-sqrt is sqrt(first step / step): the first step must be above 0, and it is {}", steps[0]);
  const std::string_view name = name_of(curve);
  const std::vector<double> s(steps.begin(), steps.end());
  const std::vector<double> means = interval_means(curve, s);
  return {differences(means), fmt::format("curve {} over steps {} to {}", name, steps.front(), steps.back()),
          largest_difference(means, interval_means(curve, evenly(s)))};
}

}  // namespace shardow
