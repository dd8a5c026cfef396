#include "file/feed.h"

#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

size_t bytes(int64_t elements, DType dtype) {
  return static_cast<size_t>(elements * dtype_bits(dtype) / 8);
}

}  // namespace

int64_t chunk_elements(DType dtype) noexcept {
  return kChunkBytes * 8 / dtype_bits(dtype) / 16 * 16;
}

std::span<const std::byte> Feed::get(const Mine& mine, int64_t begin, int64_t end, DType dtype) {
  if (mine.dtype == dtype) return {mine.data + bytes(begin, dtype), bytes(end - begin, dtype)};
  buffer_.resize(static_cast<size_t>(kChunkBytes));
  copy(mine, begin, end, dtype, buffer_.data());
  return std::span(buffer_).first(bytes(end - begin, dtype));
}

void Feed::copy(const Mine& mine, int64_t begin, int64_t end, DType dtype, std::byte* to) {
  const std::byte* const from = mine.data + bytes(begin, mine.dtype);
  if (mine.dtype == dtype) {
    std::memcpy(to, from, bytes(end - begin, dtype));
  } else {
    kernels::cpu::cast(from, mine.dtype, to, dtype, end - begin);
  }
}

}  // namespace shardow::file
