// Averages whose profile is chosen after training, from snapshots of averages with others: plan() says of which, and
// how near it comes; sweep() says that for many. Formulas and sources are in docs/posthoc.md.
//
// For any thread. plan() and sweep() read headers alone.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "posthoc/profiles.h"
#include "shardow/merge.h"
#include "shardow/schedule.h"
#include "shardow/tensor_view.h"

namespace shardow::posthoc {

/// What the profiles of snapshots are taken to be.
enum class Formula : uint8_t {
  kExact,       ///< sums over the updates that were made: what the EMA computed
  kContinuous,  ///< EDM2's integrals over power functions, for comparisons with its own code; snapshots and target are
                ///< power() then
};

struct Request {
  Schedule target;
  std::optional<int64_t> step = {};  ///< by default that of the run's last snapshot; see snapshots.h
  Formula formula = Formula::kExact;
  Poll poll = {};
};

/// One snapshot's share.
struct Term {
  std::filesystem::path path;
  std::string key;  ///< of the average
  int64_t step;
  double coefficient;
};

struct Plan {
  Schedule target;
  int64_t step;             ///< asked for
  std::vector<Term> terms;  ///< that are read, by step; their coefficients sum to 1
  size_t snapshots;         ///< that were there to choose from: those up to `step`
  double residual;          ///< |w' - w| / |w|, of what is made from what was asked for
  double variation;  ///< half of sum |w' - w|: no weight is further off than this part of the span that it covered in
                     ///< training
  double rounding;   ///< sum |c_j| u_j: and than this part of its largest stored average, by the rounding of stored
                     ///< snapshots
  double least;      ///< sum |c_j| v_j: and than this, where stored averages are subnormal: 2^-25 of float16
  double size;       ///< sum |c_j|
  std::vector<std::string> left_out;  ///< snapshots of other runs
  DType dtype;                        ///< of the averages while they were tracked
};

/// Throws kNotFound where there are no snapshots up to the step, kInvalidArgument for a step that they do not reach,
/// kUnsupported, kCorrupt.
Plan plan(const std::filesystem::path& directory, const Request& request);

/// In a few lines, for people.
std::string describe(const Plan& plan);

/// The error to expect of power(sigma_rel).
struct SweepPoint {
  double sigma_rel;
  double residual;  ///< as Plan's
  double rounding;
};
struct Sweep {
  int64_t step;
  size_t snapshots;
  std::vector<double> tracked;  ///< sigma_rel of the snapshots' own averages, where they are power()
  std::vector<SweepPoint> points;
};

/// Over `sigma_rels`, by default 46 from 0.01 to 0.28.
Sweep sweep(const std::filesystem::path& directory, std::optional<int64_t> step = {},
            std::vector<double> sigma_rels = {}, const Poll& poll = {});

/// What merge() and load_merged() are given: every snapshot of the plan, opened.
std::vector<MergeInput> inputs_of(const Plan& plan);

/// merge() of them, by default in the dtype that the averages were tracked in. Collective: every rank gives the same
/// plan.
MergeReport synthesize(Group& group, const Plan& plan, const std::filesystem::path& out, MergeOptions options = {});

}  // namespace shardow::posthoc
