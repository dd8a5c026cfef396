// A checkpoint under a temporary name, where it is until it is whole and appears by one rename: docs/durability.md
// numbers the steps.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "base/file_lock.h"
#include "file/claim.h"
#include "file/names.h"

namespace shardow::file {

/// One target, known to all ranks. A single file lies at `temporary` itself, several lie in the directory `temporary`.
struct Draft {
  base::Path target, temporary;
  std::string nonce;  ///< tells this save from others that may have died here
  bool directory;
  bool hugging_face;      ///< files are named by us, and have an index where there are several
  bool in_place = false;  ///< where nothing can be renamed: files have their own names from the beginning
  bool tried = false;     ///< whether the target may be moved, with a directory under the name of an old one
  bool keep =
      false;  ///< the disk may have it under the checkpoint's name: the next save removes it, when that is settled

  std::string host = {};                    ///< rank 0's, which makes the files
  std::vector<base::FileLock> locks = {};   ///< rank 0's, while it saves
  std::set<std::string> replaced = {};      ///< in place: what a directory has of the old checkpoint
  std::vector<std::string> made_here = {};  ///< in place: what is removed after a failure

  base::Path file(const std::string& name) const {
    const base::Path& at = in_place ? target : temporary;
    return directory ? at / name : at;
  }
};

/// Throws kInvalidArgument for what is no name of a checkpoint. The same on every rank.
Draft draft_for(const base::Path& target, bool directory, bool hugging_face, const std::string& nonce);

/// What the storage of a draft can do. Mounts of object stores often cannot.
struct Storage {
  bool random_writes = true;  ///< and several ranks' writes into one file are merged
  bool rename = true;
};

using Sizes = std::vector<std::pair<std::string, int64_t>>;  ///< files by name, in bytes

/// Rank 0. Waits until `until` for another save to the same target, removes what dead ones left, checks that there is
/// room, and makes the files, all of their length, whose first 8 bytes are zero: no reader takes them. The files are
/// also the probe of what the storage can do; where that is not random writes, they are gone again. `several_hosts`:
/// ranks run on different machines.
Storage prepare(Draft& draft, const Sizes& files, bool several_hosts, Until until);

/// Rank 0, where nothing can be renamed: what has to be there before the first file. Throws kUnsupported where files
/// with names of their own would be written over.
void prepare_in_place(Draft& draft, const std::vector<std::string>& files, Until until);

/// Rank 0, when all is done.
void release(Draft& draft) noexcept;

/// Rank 0, after a failure. Throws nothing.
void discard(Draft& draft) noexcept;

/// Rank 0, when everything in the files is on disk: puts them in place of what is there.
void publish(Draft& draft);

/// Rank 0, after the index of a directory that was written in place: removes the files that it no longer names.
void remove_old(const Draft& draft);

}  // namespace shardow::file
