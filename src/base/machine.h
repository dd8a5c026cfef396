// Which machine this is, as far as ranks need to know of each other's, and names that no other process makes.
#pragma once

#include <string>

namespace shardow::base {

/// For messages; several machines may have one name.
std::string host_name();

/// Equal for two processes that see the same files under the same numbers: one kernel, one view of its mounts. Empty
/// where that is unknown.
std::string view_of_files();

/// 16 hexadecimal digits that nothing else has.
std::string make_nonce();

}  // namespace shardow::base
