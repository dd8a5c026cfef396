// Which version of the library this is: that of the project in CMakeLists.txt.
#pragma once

namespace shardow::base {

const char* version() noexcept;

}  // namespace shardow::base
