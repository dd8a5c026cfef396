// CRC-32 with zlib's polynomial, of parts that different ranks have: the checksum of a whole is the exclusive or of its parts'
// contributions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shardow::file {

/// Of what gave `crc`, followed by `bytes`. crc32(0, ...) begins.
uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes) noexcept;

/// What a part with this checksum contributes to a whole in which `after` bytes follow it. The contributions of parts that cover a whole
/// exactly once, combined by exclusive or in any order, are the whole's checksum (zlib's crc32_combine: a CRC is linear).
uint32_t crc32_contribution(uint32_t crc, int64_t after) noexcept;

}  // namespace shardow::file
