// What was asked for: checked on each rank, and the same on all.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "file/header.h"
#include "file/producer.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// Throws kInvalidArgument or kUnsupported for what no save can do. `producer`: of what has no memory; may be null.
/// Local.
void check_call(std::span<const SaveFile> files, const SaveOptions& options, const Producer* producer);

/// Throws kInvalidArgument where a view's data is null. Local.
void check_memory(std::span<const TensorView> views);

/// What all ranks know of a call when it has begun.
struct Call {
  std::string nonce;  ///< rank 0's, of this save alone
  std::string host;   ///< rank 0's
  bool several_hosts;
  std::vector<Metadata> metadata;  ///< of each file, rank 0's
};

/// Throws kInvalidArgument on every rank where ranks differ in anything but their tensors and metadata, naming what
/// differs. Collective.
Call same_call(Group& group, std::span<const SaveFile> files, const std::filesystem::path& path,
               const SaveOptions& options, Deadline deadline);

}  // namespace shardow::file
