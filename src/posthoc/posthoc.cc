#include "posthoc/posthoc.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "average/schedule_table.h"
#include "base/errors.h"
#include "posthoc/snapshots.h"
#include "posthoc/solve.h"

namespace shardow::posthoc {
namespace {

using base::fail;

constexpr double kNothing = 1e-15;  // a coefficient of which no output dtype would show anything

PowerPoint power_point(const Schedule& schedule, int64_t step) {
  const auto sigma_rel = sigma_rel_of(schedule);
  if (!sigma_rel) {
    fail(Code::kInvalidArgument,
         "the continuous formula is one of power functions; {} is none: use the exact one, for any schedule",
         schedule.key());
  }
  return {average::power_gamma(*sigma_rel), static_cast<double>(step)};
}

Products products_of(const Snapshots& all, const Request& request) {
  if (request.formula == Formula::kExact) {
    const std::vector<Profile> targets(1, Profile(all.updates.record().size(), request.target));
    return exact_products(all.updates, all.profiles, all.points, targets, request.poll);
  }
  for (const Profile& one : all.profiles) {
    if (one != Profile(one.size(), one[0]))
      fail(Code::kInvalidArgument, "the continuous formula takes one schedule for all of a run; use the exact one");
  }
  const auto since_start = [&](int64_t updates) { return all.updates.at(updates - 1).progress.step; };
  std::vector<PowerPoint> points;
  for (const Point& one : all.points)
    points.push_back(power_point(all.profiles[one.profile][0], since_start(one.updates)));
  const std::vector<PowerPoint> target{power_point(request.target, since_start(all.updates.size()))};
  return power_products(points, target);
}

std::vector<double> roundoffs_of(const Snapshots& all) {
  std::vector<double> found;
  for (const Snapshot& one : all.there) found.push_back(one.roundoff);
  return found;
}

/// From the products alone: a difference of nearly equal numbers, good to 1e-9.
double residual(const Products& products, size_t target, const std::vector<double>& c) {
  const auto& [with, norm] = products.targets[target];
  long double square = norm;
  for (size_t i = 0; i < c.size(); ++i) {
    square -= 2 * c[i] * with[i];
    for (size_t j = 0; j < c.size(); ++j) square += products.gram[i][j] * c[i] * c[j];
  }
  return static_cast<double>(std::sqrt(std::max<long double>(square / norm, 0)));
}

}  // namespace

Plan plan(const std::filesystem::path& directory, const Request& request) {
  const Snapshots all = snapshots_in(directory, request.step);
  const Products products = products_of(all, request);
  std::vector<double> c = Solver(products, roundoffs_of(all), request.poll).solve(products.targets[0]);
  for (double& one : c) one = std::fabs(one) < kNothing ? 0 : one;
  const Profile target(all.updates.record().size(), request.target);
  const Difference off = difference(all.updates, all.profiles, all.points, c, target, request.poll);
  Plan found{request.target, all.step, {}, all.there.size(), off.residual, off.variation, 0, 0, 0,
             all.left_out,   all.dtype};
  for (size_t j = 0; j < c.size(); ++j) {
    if (c[j] == 0) continue;
    found.terms.push_back({all.there[j].path, all.there[j].key, all.there[j].step, c[j]});
    found.rounding += std::fabs(c[j]) * all.there[j].roundoff;
    found.least += std::fabs(c[j]) * all.there[j].least;
    found.size += std::fabs(c[j]);
  }
  return found;
}

std::string describe(const Plan& plan) {
  std::string text =
      fmt::format("{} at step {} from {} of {} snapshots (steps {} to {})\n", plan.target.key(), plan.step,
                  plan.terms.size(), plan.snapshots, plan.terms.front().step, plan.terms.back().step);
  text += fmt::format("  residual  {:.2e}  of the profile's norm\n", plan.residual);
  text += fmt::format("  error     {:.2e}  at most, in parts of the span that a weight covered in training\n",
                      plan.variation);
  text +=
      fmt::format("  rounding  {:.2e}  at most, in parts of its largest average; coefficients' sizes sum to {:.4g}\n",
                  plan.rounding, plan.size);
  if (plan.least > 1e-30)
    text += fmt::format("  and       {:.2e}  at most, where averages are subnormal in float16\n", plan.least);
  for (const std::string& one : plan.left_out) text += fmt::format("  left out  {}\n", one);
  return text;
}

Sweep sweep(const std::filesystem::path& directory, std::optional<int64_t> step, std::vector<double> sigma_rels,
            const Poll& poll) {
  if (sigma_rels.empty()) {
    for (int i = 0; i <= 45; ++i) sigma_rels.push_back(std::min(0.01 + 0.006 * i, 0.28));
  }
  const Snapshots all = snapshots_in(directory, step);
  std::vector<Profile> targets;
  targets.reserve(sigma_rels.size());
  for (const double one : sigma_rels) targets.emplace_back(all.updates.record().size(), Schedule::power(one));
  const Products products = exact_products(all.updates, all.profiles, all.points, targets, poll);
  const std::vector<double> roundoffs = roundoffs_of(all);
  const Solver solver(products, roundoffs, poll);
  Sweep found{all.step, all.there.size(), {}, {}};
  for (const Profile& one : all.profiles) {
    if (const auto sigma_rel = sigma_rel_of(one.back())) found.tracked.push_back(*sigma_rel);
  }
  for (size_t i = 0; i < sigma_rels.size(); ++i) {
    const std::vector<double> c = solver.solve(products.targets[i]);
    double rounding = 0;
    for (size_t j = 0; j < c.size(); ++j) rounding += std::fabs(c[j]) * roundoffs[j];
    found.points.push_back({sigma_rels[i], residual(products, i, c), rounding});
  }
  return found;
}

std::vector<MergeInput> inputs_of(const Plan& plan) {
  std::vector<MergeInput> inputs;
  for (const Term& one : plan.terms)
    inputs.push_back({one.path.string(), Checkpoint::open(one.path), one.coefficient, one.step});
  return inputs;
}

MergeReport synthesize(Group& group, const Plan& plan, const std::filesystem::path& out, MergeOptions options) {
  if (!options.dtype) options.dtype = plan.dtype;
  options.formula =
      fmt::format("post-hoc {} at step {}: residual {:.3e}, error at most {:.3e} of each weight's span in training",
                  plan.target.key(), plan.step, plan.residual, plan.variation);
  return merge(group, inputs_of(plan), out, options);
}

}  // namespace shardow::posthoc
