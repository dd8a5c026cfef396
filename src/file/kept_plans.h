// What a save has worked out, for the next one of the same tensors.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "file/layout.h"
#include "file/sharing.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// What one rank writes of a tensor: `region`, which begins at element `local_begin` of view `view` of file `file`.
struct OwnPart {
  size_t file, view, tensor, piece;
  Region region;
  int64_t local_begin;
};

/// Follows from names, dtypes, regions and options: where the tensors' memory is does not matter.
struct KeptPlan {
  std::vector<Sharing> sharings;  ///< by file
  std::shared_ptr<const Arrangement> arrangement;
  std::vector<OwnPart> own;  ///< ascending by tensor
};

/// The plan of this rank's last save with just these names, dtypes and regions, in this order, and these options; null
/// where there was none lately. Whether the other ranks have what they had is for them to say: share().
std::shared_ptr<const KeptPlan> kept_plan(const Group& group, std::span<const SaveFile> files,
                                          const SaveOptions& options);

/// Works one out, and keeps it. Throws kInvalidArgument where regions of a tensor overlap, or no rank holds some
/// element.
std::shared_ptr<const KeptPlan> new_plan(const Group& group, std::span<const SaveFile> files,
                                         const SaveOptions& options, std::vector<Sharing> sharings);

/// For tests that compare saves call by call.
void forget_plans();

}  // namespace shardow::file
