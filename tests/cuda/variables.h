// The environment's variables that say what the fake driver and the fake NVRTC are.
#pragma once

#include <cstdlib>

namespace shardow::fake {

inline int number_from(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

}  // namespace shardow::fake
