// How a checkpoint appears: under a temporary name until it is whole, then by one rename. docs/durability.md numbers the steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/files.h"

namespace shardow::file {

/// One target, known to all ranks. A single file lies at `temporary` itself, several lie in the directory `temporary`.
struct Draft {
  base::Path target, temporary;
  std::string nonce;  ///< tells this save from others that may have died here
  bool directory;
  bool in_place = false;  ///< where nothing can be renamed: files have their own names from the beginning

  base::Path file(const std::string& name) const {
    const base::Path& at = in_place ? target : temporary;
    return directory ? at / name : at;
  }
};

Draft draft_for(const base::Path& target, bool directory, const std::string& nonce);

/// What the storage of a draft can do. Mounts of object stores often cannot.
struct Storage {
  bool random_writes = true;  ///< and several ranks' writes into one file are merged
  bool rename = true;
};

/// Rank 0. Removes what saves to the same target left behind when they died, checks that there is room, and makes the files, all of their
/// length, whose first 8 bytes are zero: no reader takes them. The files are also the probe of what the storage can do; where that is not
/// random writes, they are gone again. `several_hosts`: ranks run on different machines.
Storage prepare(const Draft& draft, const std::vector<std::pair<std::string, int64_t>>& files, bool several_hosts);

/// Rank 0, where nothing can be renamed: what has to be there before the first file.
void prepare_in_place(const Draft& draft);

/// Rank 0, when everything in the files is on disk: puts them in place of what is there.
void publish(const Draft& draft);

/// Rank 0, after the index of a directory that was written in place: removes the files that it no longer names.
void remove_old(const Draft& draft);

/// Rank 0, after a failure. Throws nothing.
void discard(const Draft& draft) noexcept;

}  // namespace shardow::file
