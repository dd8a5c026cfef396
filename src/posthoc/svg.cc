// The sweep as a picture: error over sigma_rel, with a logarithmic scale of the error.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "posthoc/posthoc.h"

namespace shardow::posthoc {
namespace {

constexpr double kLeft = 70, kRight = 700, kTop = 50, kBottom = 370,
                 kMost = 0.3;  // of the plot, in pixels; of sigma_rel

double x_of(double sigma_rel) {
  return kLeft + (kRight - kLeft) * sigma_rel / kMost;
}

/// Decades from 1 down to the last.
struct Scale {
  double decades;
  double y_of(double error) const {
    return std::clamp(kTop - (kBottom - kTop) * std::log10(std::max(error, 1e-300)) / decades, kTop, kBottom);
  }
};

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}'>{}</text>\n", x, y, anchor, text);
}

std::string line(double x0, double y0, double x1, double y1, const char* style) {
  return fmt::format("<line x1='{:.1f}' y1='{:.1f}' x2='{:.1f}' y2='{:.1f}' {}/>\n", x0, y0, x1, y1, style);
}

std::string curve(const Sweep& sweep, Scale scale, const char* style,
                  const std::function<double(const SweepPoint&)>& of) {
  std::string points;
  for (const SweepPoint& one : sweep.points)
    points += fmt::format("{:.1f},{:.1f} ", x_of(one.sigma_rel), scale.y_of(of(one)));
  return fmt::format("<polyline points='{}' fill='none' stroke-width='2' {}/>\n", points, style);
}

}  // namespace

std::string svg(const Sweep& sweep) {
  double least = 0.1;
  for (const SweepPoint& one : sweep.points)
    least = std::min({least, std::max(one.residual, 1e-12), std::max(one.rounding, 1e-12)});
  const Scale scale{std::ceil(-std::log10(least))};
  std::string body;
  for (int k = 0; k <= static_cast<int>(scale.decades); ++k) {
    const double y = scale.y_of(std::pow(10.0, -k));
    body += line(kLeft, y, kRight, y, "stroke='#e6e9ef'") +
            text_at(kLeft - 8, y + 4, "end", k == 0 ? "1" : fmt::format("1e-{:02}", k));
  }
  for (int k = 0; k <= 6; ++k) body += text_at(x_of(0.05 * k), kBottom + 20, "middle", fmt::format("{:.2f}", 0.05 * k));
  for (const double one : sweep.tracked) {
    body += line(x_of(one), kTop, x_of(one), kBottom, "stroke='#5b6475' stroke-dasharray='2 3'");
    body += text_at(x_of(one), kTop - 6, "middle", fmt::format("{:g}", one));
  }
  body += curve(sweep, scale, "stroke='#2c6fbb'", [](const SweepPoint& one) { return one.residual; });
  body += curve(sweep, scale, "stroke='#d9692b' stroke-dasharray='6 4'",
                [](const SweepPoint& one) { return one.rounding; });
  body += text_at((kLeft + kRight) / 2, kBottom + 42, "middle", "sigma_rel of the average that is asked for");
  body += text_at(kLeft, 20, "start",
                  fmt::format("Expected error at step {}, from {} snapshots", sweep.step, sweep.snapshots));
  body += line(kLeft, 440, kLeft + 30, 440, "stroke='#2c6fbb' stroke-width='2'");
  body += text_at(kLeft + 38, 444, "start", "residual of the profile");
  body += line(kLeft + 240, 440, kLeft + 270, 440, "stroke='#d9692b' stroke-width='2' stroke-dasharray='6 4'");
  body += text_at(kLeft + 278, 444, "start", "rounding of the snapshots, at most; dotted: tracked");
  return fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' width='740' height='460' font-family='sans-serif' font-size='13' "
      "fill='#1d2433'>\n"
      "<rect width='740' height='460' fill='#ffffff'/>\n{}</svg>\n",
      body);
}

}  // namespace shardow::posthoc
