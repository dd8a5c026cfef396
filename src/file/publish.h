// How a checkpoint appears: under a temporary name until it is whole, then by one rename. docs/durability.md numbers the steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/files.h"

namespace shardow::file {

/// One target, prepared by rank 0 and known to all. A single file lies at `temporary` itself, several lie in the directory `temporary`.
struct Draft {
  base::Path target, temporary;
  bool directory;

  base::Path file(const std::string& name) const { return directory ? temporary / name : temporary; }
};

/// `nonce` tells this save from others that may have died here.
Draft draft_for(const base::Path& target, bool directory, const std::string& nonce);

/// Rank 0. Removes what saves to the same target left behind when they died, checks that there is room, and makes the files, all of their
/// length, whose first 8 bytes are zero: no reader takes them.
void prepare(const Draft& draft, const std::vector<std::pair<std::string, int64_t>>& files);

/// Rank 0, when everything in the files is on disk: puts them in place of what is there.
void publish(const Draft& draft);

/// Rank 0, after a failure. Throws nothing.
void discard(const Draft& draft) noexcept;

}  // namespace shardow::file
