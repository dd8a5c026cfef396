// What tells one save from every other.
#pragma once

#include <string>

namespace shardow::base {

/// 16 hexadecimal digits that nothing else has.
std::string make_nonce();

}  // namespace shardow::base
