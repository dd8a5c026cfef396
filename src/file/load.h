// Loading from a catalog that has been read before.
#pragma once

#include <span>

#include "file/catalog.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// As shardow::load(). The catalog is the same on every rank: share_catalog() gave it.
LoadReport load_from(Group& group, std::span<const TensorView> views, const Catalog& catalog, const LoadOptions& options);

/// Fills `view` from the tensor of its name, converting its dtype; compares the checksum where the file carries one and all is read. Local.
/// Throws kNotFound, kInvalidArgument, kCorrupt, and kIo with ESTALE where the file was written over.
void read_one(const Catalog& catalog, const TensorView& view);

}  // namespace shardow::file
