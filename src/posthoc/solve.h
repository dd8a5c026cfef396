// The sum of snapshots whose profile is nearest to a target's, in the Euclidean norm, with coefficients that sum to 1.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "posthoc/profiles.h"

namespace shardow::posthoc {

/// Solves for many targets with one decomposition. `roundoff`: of each snapshot's stored numbers, in proportion to
/// them.
class Solver {
 public:
  Solver(const Products& products, std::span<const double> roundoff, const Poll& poll = {});
  ~Solver();

  /// Coefficients by point; they sum to 1 but for rounding.
  std::vector<double> solve(const Products::Target& target) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardow::posthoc
