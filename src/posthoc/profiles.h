// How much of every update's weights is in an average, and how alike two averages are in that.
//
// An average after n updates is a sum over what the weights were, sum w_i theta_i, with w_i = (1 - d_i) d_(i+1) ...
// d_n; theta_0 is what it began with. Its profile is w. Inner products of profiles are sums over updates, exact but for
// rounding: of what the EMA computed, whatever its schedule and its steps.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "posthoc/record.h"

namespace shardow::posthoc {

/// The schedule of an average, in each segment of a record.
using Profile = std::vector<Schedule>;

/// Of a power function, power(sigma_rel); nothing for another schedule.
std::optional<double> sigma_rel_of(const Schedule& schedule);

/// An average as it was after so many updates.
struct Point {
  size_t profile;
  int64_t updates;
};

/// Called now and then while updates are gone through; may throw, which ends that.
using Poll = std::function<void()>;

/// Inner products of points with each other and with targets. In long double: a Gram matrix squares what is nearly
/// alike.
struct Products {
  struct Target {
    std::vector<long double> with;  ///< by point
    long double norm;               ///< squared
  };
  std::vector<std::vector<long double>> gram;
  std::vector<Target> targets;
};

/// `points` in the order of their updates; targets are profiles after all updates. Takes O(updates x profiles x
/// (profiles + targets)) time, and no memory that grows with the updates. Throws kUnsupported where that would be many
/// minutes.
Products exact_products(const Updates& updates, std::span<const Profile> profiles, std::span<const Point> points,
                        std::span<const Profile> targets, const Poll& poll = {});

/// A power-function profile gamma at time t: p(s) = (gamma + 1) s^gamma / t^(gamma + 1) for 0 <= s <= t.
struct PowerPoint {
  double gamma, time;
};

/// The integrals of EDM2 (Karras et al., arXiv 2312.02696, appendix C), of products of such profiles:
/// (ga + 1) (gb + 1) min^(ga + gb + 1) / ((ga + gb + 1) ta^(ga + 1) tb^(gb + 1)), min the earlier time.
Products power_products(std::span<const PowerPoint> points, std::span<const PowerPoint> targets);

/// Of sum c_j (point j) from a target, over all updates.
struct Difference {
  double residual;   ///< the Euclidean norm, in proportion to the target's
  double variation;  ///< half the sum of absolute differences: no weight is further off than this part of the span that
                     ///< it covered
};
Difference difference(const Updates& updates, std::span<const Profile> profiles, std::span<const Point> points,
                      std::span<const double> coefficients, const Profile& target, const Poll& poll = {});

}  // namespace shardow::posthoc
