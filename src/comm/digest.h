// Whether ranks would say the same, in eight bytes.
#pragma once

#include <cstdint>
#include <string_view>

namespace shardow::comm {

/// FNV-1a: tells texts apart that differ by mistake, not by malice.
inline uint64_t digest(std::string_view text) noexcept {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace shardow::comm
