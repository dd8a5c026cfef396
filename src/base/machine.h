// Which machine this is, as far as ranks need to know of each other's.
#pragma once

#include <string>

namespace shardow::base {

/// For messages; several machines may have one name.
std::string host_name();

/// Equal for two processes that see the same files under the same numbers: one kernel, one view of its mounts. Empty
/// where that is unknown.
std::string view_of_files();

}  // namespace shardow::base
