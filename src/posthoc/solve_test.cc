#include "posthoc/solve.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace shardow::posthoc {
namespace {

/// Profiles with little in common.
Products products_of(size_t points) {
  Products products{std::vector(points, std::vector<long double>(points, 0.25L)), {}};
  for (size_t i = 0; i < points; ++i) products.gram[i][i] = 1;
  products.targets.push_back({std::vector<long double>(points, 0.5L), 1});
  return products;
}

TEST(Solve, PollThatThrowsEndsTheDecompositionOfManySnapshots) {
  const Products products = products_of(300);
  const std::vector<double> roundoff(300, 1e-8);
  int polls = 0;
  const Poll stop = [&] {
    if (++polls == 2) throw std::runtime_error("stop");
  };
  EXPECT_THROW(Solver(products, roundoff, stop), std::runtime_error);
  EXPECT_EQ(polls, 2);
}

TEST(Solve, PollChangesNoCoefficient) {
  const Products products = products_of(160);
  const std::vector<double> roundoff(160, 1e-8);
  const auto& target = products.targets[0];
  EXPECT_EQ(Solver(products, roundoff, [] {}).solve(target), Solver(products, roundoff).solve(target));
}

}  // namespace
}  // namespace shardow::posthoc
