// Whether regions hold all of a tensor together.
#pragma once

#include <cstdint>
#include <vector>

#include "shardow/region.h"

namespace shardow {

/// True if the regions, all of one shape, hold every element at least once / exactly once. On false, `where` is one
/// element that shows it. Throws kInvalidArgument for different shapes and for no regions. Cost O(runs log regions).
bool covers(const std::vector<Region>& regions, int64_t* where = nullptr);
bool covers_once(const std::vector<Region>& regions, int64_t* where = nullptr);

}  // namespace shardow
