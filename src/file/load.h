// Loading from a catalog that has been read before.
#pragma once

#include <span>

#include "file/catalog.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// As shardow::load(). The catalog is the same on every rank: share_catalog() gave it.
LoadReport load_from(Group& group, std::span<const TensorView> views, const Catalog& catalog, const LoadOptions& options);

}  // namespace shardow::file
