#include "base/version.h"

namespace shardow::base {

const char* version() noexcept {
  return SHARDOW_VERSION;
}

}  // namespace shardow::base
