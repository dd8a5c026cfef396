#include "file/crc.h"

#include <isa-l/crc.h>
#include <zlib.h>

namespace shardow::file {

uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes) noexcept {
  return crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

uint32_t crc32_contribution(uint32_t crc, int64_t after) noexcept {
  return static_cast<uint32_t>(crc32_combine(crc, 0, after));
}

}  // namespace shardow::file
