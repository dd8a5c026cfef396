// How a checkpoint appears: by one rename, when all of its draft is on the disk.
#pragma once

#include "file/draft.h"

namespace shardow::file {

/// Rank 0, when everything in the files is on disk: puts them in place of what is there.
void publish(Draft& draft);

/// Rank 0, after the index of a directory that was written in place: removes the files that it no longer names.
void remove_old(const Draft& draft);

}  // namespace shardow::file
