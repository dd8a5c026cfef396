#include "file/crc.h"

#include <isa-l/crc.h>
#include <zlib.h>

#include <utility>

namespace shardow::file {

uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes) noexcept {
  return crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

uint32_t crc32_contribution(uint32_t crc, int64_t after) noexcept {
  return static_cast<uint32_t>(crc32_combine(crc, 0, after));
}

void CrcSum::add(int64_t begin, std::span<const std::byte> data) noexcept {
  const int64_t end = begin + static_cast<int64_t>(data.size());
  sum_ = moved(sum_, end - end_) ^ crc32(0, data);
  end_ = end;
}

uint32_t CrcSum::take(int64_t size) noexcept {
  const uint32_t sum = moved(sum_, size - end_);
  sum_ = 0;
  end_ = 0;
  return sum;
}

uint32_t CrcSum::moved(uint32_t crc, int64_t by) noexcept {
  if (crc == 0 || by == 0) return crc;
  for (const Operator& one : kept_) {
    if (one.by == by) return static_cast<uint32_t>(crc32_combine_op(crc, 0, one.value));
  }
  Operator& one = kept_[std::exchange(oldest_, (oldest_ + 1) % kept_.size())];
  one = {by, static_cast<uint32_t>(crc32_combine_gen(by))};
  return static_cast<uint32_t>(crc32_combine_op(crc, 0, one.value));
}

}  // namespace shardow::file
