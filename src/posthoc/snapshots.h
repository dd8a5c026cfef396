// The snapshots in a directory: DIR/snapshot-000001000/ema-<key>.safetensors, and the same of whole checkpoints,
// DIR/step-000001000.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "posthoc/profiles.h"
#include "posthoc/record.h"
#include "shardow/tensor_view.h"

namespace shardow::posthoc {

struct Snapshot {
  std::filesystem::path path;
  std::string key;
  int64_t step;     ///< that its averages are of
  double roundoff;  ///< of the stored numbers, in proportion to them: half a unit in the last place
  double least;     ///< and of those that are subnormal
};

/// What of a directory bears on an average at `step`, by step: snapshots of one run. Of runs that were given up for
/// another, which was resumed from an earlier step or began again, the one that is not; they are asked where that one
/// does not reach the step.
struct Snapshots {
  int64_t step;
  Updates updates;                ///< up to there
  std::vector<Profile> profiles;  ///< of all averages
  std::vector<Snapshot> there;
  std::vector<Point> points;          ///< of each
  std::vector<std::string> left_out;  ///< those of other runs: path and why
  DType dtype;                        ///< of the averages as they were tracked
};

/// `step` is by default that run's last. Throws as plan() does; kInvalidArgument too where two runs went on beside each
/// other, naming them.
Snapshots snapshots_in(const std::filesystem::path& directory, std::optional<int64_t> step);

/// Throws kInvalidArgument where `out`, a file or a directory that is to be written, would take the place of a
/// snapshot's files in `directory`.
void check_output(const std::filesystem::path& directory, const std::filesystem::path& out);

}  // namespace shardow::posthoc
