// The snapshots in a directory: DIR/snapshot-000001000/ema-<key>.safetensors, and the same of whole checkpoints, DIR/step-000001000.
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
};

/// What of a directory bears on an average at `step`, by step.
struct Snapshots {
  int64_t step;
  Updates updates;                ///< up to there
  std::vector<Profile> profiles;  ///< of all averages
  std::vector<Snapshot> there;
  std::vector<Point> points;          ///< of each
  std::vector<std::string> left_out;  ///< whose run went on differently: path and why
  DType dtype;                        ///< of the averages as they were tracked
};

/// Throws as plan() does.
Snapshots snapshots_in(const std::filesystem::path& directory, std::optional<int64_t> step);

}  // namespace shardow::posthoc
