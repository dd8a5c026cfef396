// What was asked for: checked on each rank, and the same on all.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "file/header.h"
#include "file/ownership.h"
#include "file/producer.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// Throws kInvalidArgument where a view's data is null. Local.
void check_memory(std::span<const TensorView> views);

/// What all ranks know of a call when it has begun.
struct Call {
  std::string nonce;  ///< rank 0's, of this save alone
  std::string host;   ///< rank 0's
  bool several_hosts;
  std::vector<Metadata> metadata;                                   ///< of each file, rank 0's
  std::vector<std::shared_ptr<const std::vector<Shared>>> tensors;  ///< of each file, ascending by name
};

/// Throws kInvalidArgument or kUnsupported for what no save can do, and kInvalidArgument where ranks differ in anything
/// but which parts of tensors they hold and metadata, naming what differs; on every rank. `producer`: of what has no
/// memory; may be null. One round, and another where ranks have different tensors. Collective.
Call same_call(Group& group, std::span<const SaveFile> files, const std::filesystem::path& path,
               const SaveOptions& options, const Producer* producer);

/// Whether a save to `path` makes a directory: where it is of files with names, or the path names none.
bool makes_directory(std::span<const SaveFile> files, const std::filesystem::path& path);

}  // namespace shardow::file
