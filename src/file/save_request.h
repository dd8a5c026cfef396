// Save request of one rank, and its checks before ranks meet.
#pragma once

#include <filesystem>
#include <span>
#include <vector>

#include "file/producer.h"
#include "group/facts.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// Files to save, and where, as one rank is asked to.
struct Request {
  std::vector<SaveFile> files;
  std::filesystem::path path;
  SaveOptions options;
  group::Facts facts = {};  ///< what else must be equal on all ranks
};

/// Throws kInvalidArgument or kUnsupported for what no save can do. `producer`: of what has no memory, or null.
void check_request(const Request& request, const Producer* producer);

/// Returns what must be equal on all ranks.
group::Facts facts_of(const Request& request);

/// Throws kInvalidArgument where a view's data is null.
void check_memory(std::span<const TensorView> views);

/// Returns whether a save to `path` makes a directory: where it is of files with names, or the path names none.
bool makes_directory(std::span<const SaveFile> files, const std::filesystem::path& path);

}  // namespace shardow::file
