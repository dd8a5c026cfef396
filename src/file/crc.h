// CRC-32 with zlib's polynomial, of parts that different ranks have: the checksum of a whole is the exclusive or of its
// parts' contributions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace shardow::file {

/// Of what gave `crc`, followed by `bytes`. crc32(0, ...) begins.
uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes) noexcept;

/// What a part with this checksum contributes to a whole in which `after` bytes follow it. The contributions of parts
/// that cover a whole exactly once, combined by exclusive or in any order, are the whole's checksum (zlib's
/// crc32_combine: a CRC is linear).
uint32_t crc32_contribution(uint32_t crc, int64_t after) noexcept;

/// The contribution of many parts of one whole, which come in ascending order. Making the operator that moves a
/// checksum over a distance takes a microsecond, applying it a twentieth of that: those of the last distances are kept,
/// and runs of a shard have few.
class CrcSum {
 public:
  void add(int64_t begin, std::span<const std::byte> data) noexcept;

  int64_t end() const noexcept { return end_; }  ///< of what was added last

  /// Of all that was added, to a whole of `size` bytes; begins anew.
  uint32_t take(int64_t size) noexcept;

 private:
  uint32_t moved(uint32_t crc, int64_t by) noexcept;

  struct Operator {
    int64_t by = -1;
    uint32_t value = 0;
  };
  std::array<Operator, 4> kept_;
  size_t oldest_ = 0;
  uint32_t sum_ = 0;  // of what was added, as if the whole ended at end_
  int64_t end_ = 0;
};

}  // namespace shardow::file
