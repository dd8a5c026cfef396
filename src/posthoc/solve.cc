// Minimise |P x - t|^2 + rho |D x|^2 with sum(x) = 1, given G = P'P, b = P't and t't; D are the norms of P's columns.
// With y = D x, C = D^-1 G D^-1 = V L V', beta = V'D^-1 b and sigma = V'D^-1 1:
//
//   eta = V'y = (beta + mu sigma) / (lambda + rho),   mu such that sigma'eta = 1;   |P x - t|^2 = t't - 2 eta'beta +
//   eta'L eta
//
// Neighbouring snapshots are nearly alike, so that C is nearly singular, and without rho coefficients would be large
// with changing signs: they multiply what rounding did to the stored snapshots. So of many rho, from the products' own
// rounding up, the one is taken that makes the residual and that rounding together least. One snapshot alone is tried
// too: a target that is one of them is that one.
#include "posthoc/solve.h"

#include <Eigen/Eigenvalues>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <thread>
#include <utility>

#include "base/errors.h"

namespace shardow::posthoc {
namespace {

using Matrix = Eigen::Matrix<long double, Eigen::Dynamic, Eigen::Dynamic>;
using Vector = Eigen::Matrix<long double, Eigen::Dynamic, 1>;

constexpr long double kVanishing = 64 * std::numeric_limits<long double>::epsilon();

using EigenSolver = Eigen::SelfAdjointEigenSolver<Matrix>;

/// Takes n^3 steps, seconds for a thousand snapshots, and Eigen can't be interrupted: where `poll` throws meanwhile, a
/// thread goes on with its own memory, and its result is discarded.
std::shared_ptr<const EigenSolver> decomposed(Matrix gram, const Poll& poll) {
  constexpr Eigen::Index kQuick = 150;
  const auto solver = std::make_shared<EigenSolver>();
  if (!poll || gram.rows() < kQuick) {
    solver->compute(gram);
    return solver;
  }
  std::packaged_task<void()> work([solver, gram = std::move(gram)] { solver->compute(gram); });
  std::future<void> done = work.get_future();
  std::thread(std::move(work)).detach();
  while (done.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) poll();
  done.get();
  return solver;
}

}  // namespace

struct Solver::Impl {
  Vector scale, roundoff;  // scale: the norms of the points' profiles
  Matrix directions;
  Vector eigenvalues;  // ascending

  /// What a solution costs: what it misses of the target, in proportion to that, and what rounding adds. A square that
  /// is a difference of nearly equal ones may be nothing.
  long double cost(const Vector& x, long double square, long double norm) const {
    return (square < kVanishing * norm ? 0 : std::sqrt(square / norm)) + x.cwiseAbs().dot(roundoff);
  }
};

Solver::Solver(const Products& products, std::span<const double> roundoff, const Poll& poll)
    : impl_(std::make_unique<Impl>()) {
  const auto n = static_cast<Eigen::Index>(products.gram.size());
  impl_->scale.resize(n);
  impl_->roundoff.resize(n);
  Matrix gram(n, n);
  for (Eigen::Index i = 0; i < n; ++i) {
    impl_->scale[i] = std::sqrt(products.gram[static_cast<size_t>(i)][static_cast<size_t>(i)]);
    impl_->roundoff[i] = roundoff[static_cast<size_t>(i)];
  }
  for (Eigen::Index i = 0; i < n; ++i) {
    for (Eigen::Index j = 0; j < n; ++j)
      gram(i, j) = products.gram[static_cast<size_t>(i)][static_cast<size_t>(j)] / (impl_->scale[i] * impl_->scale[j]);
  }
  const auto solver = decomposed(std::move(gram), poll);
  if (solver->info() != Eigen::Success)
    base::fail(Code::kInternal, "the eigenvalues of {} snapshots' Gram matrix were not found", n);
  impl_->directions = solver->eigenvectors();
  impl_->eigenvalues = solver->eigenvalues();
}

Solver::~Solver() = default;

std::vector<double> Solver::solve(const Products::Target& target) const {
  const Impl& m = *impl_;
  const Eigen::Index n = m.scale.size();
  const Vector b = Eigen::Map<const Vector>(target.with.data(), n);
  Vector best;
  long double best_cost = std::numeric_limits<long double>::infinity();
  const auto consider = [&](const Vector& x, long double square) {
    const long double cost = m.cost(x, square, target.norm);
    if (cost < best_cost * (1 - 1e-6L)) best = x, best_cost = cost;
  };
  for (Eigen::Index j = 0; j < n; ++j) consider(Vector::Unit(n, j), target.norm - 2 * b[j] + m.scale[j] * m.scale[j]);
  const Vector beta = m.directions.transpose() * b.cwiseQuotient(m.scale);
  const Vector sigma = m.directions.transpose() * m.scale.cwiseInverse();
  const long double largest = m.eigenvalues[n - 1];
  long double rho = kVanishing * largest * static_cast<long double>(n);
  while (rho < largest) {
    const Vector inverse = (m.eigenvalues.array().max(0) + rho).inverse();
    const long double mu = (1 - sigma.cwiseProduct(inverse).dot(beta)) / sigma.cwiseProduct(inverse).dot(sigma);
    const Vector eta = (beta + mu * sigma).cwiseProduct(inverse);
    consider((m.directions * eta).cwiseQuotient(m.scale),
             target.norm - 2 * eta.dot(beta) + eta.cwiseProduct(m.eigenvalues).dot(eta));
    rho *= 3;
  }
  if (best.size() == 0)
    base::fail(Code::kInvalidArgument, "profiles as narrow as these have inner products that no float64 holds");
  return {best.data(), best.data() + n};
}

}  // namespace shardow::posthoc
