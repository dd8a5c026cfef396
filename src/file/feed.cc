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
  if (mine.dtype == dtype && begin < end && mine.producer == nullptr) {
    if (!on_device(mine.device)) return {mine.data + bytes(begin, dtype), bytes(end - begin, dtype)};
    Block& block = block_at(mine, begin);
    if (end <= block.end)
      return {block.memory.data(mine.device) + bytes(begin - block.begin, dtype), bytes(end - begin, dtype)};
  }
  if (const size_t size = bytes(end - begin, dtype); buffer_.size() < size) buffer_.resize(size);
  copy(mine, begin, end, dtype, buffer_.data());
  return std::span(buffer_).first(bytes(end - begin, dtype));
}

void Feed::copy(const Mine& mine, int64_t begin, int64_t end, DType dtype, std::byte* to) {
  if (mine.producer != nullptr) return produce(mine, begin, end, dtype, to);
  while (begin < end) {
    int64_t until = end;
    const std::byte* from = mine.data + bytes(begin, mine.dtype);
    if (on_device(mine.device)) {
      Block& block = block_at(mine, begin);
      until = std::min(end, block.end);
      from = block.memory.data(mine.device) + bytes(begin - block.begin, mine.dtype);
    }
    if (mine.dtype == dtype) {
      std::memcpy(to, from, bytes(until - begin, dtype));
    } else {
      kernels::cpu::cast(from, mine.dtype, to, dtype, until - begin);
    }
    to += bytes(until - begin, dtype);
    begin = until;
  }
}

/// In the view's own dtype, and cast from there.
void Feed::produce(const Mine& mine, int64_t begin, int64_t end, DType dtype, std::byte* to) {
  while (begin < end) {
    const int64_t until = mine.dtype == dtype ? end : std::min(end, begin + chunk_elements(mine.dtype));
    std::byte* into = to;
    if (mine.dtype != dtype) {
      if (const size_t size = bytes(until - begin, mine.dtype); produced_.size() < size) produced_.resize(size);
      into = produced_.data();
    }
    mine.producer->read({mine.name, mine.dtype, mine.region.window(begin, until), into});
    if (mine.dtype != dtype) kernels::cpu::cast(into, mine.dtype, to, dtype, until - begin);
    to += bytes(until - begin, dtype);
    begin = until;
  }
}

/// The block with the element; what comes after it is on its way into the other one.
Feed::Block& Feed::block_at(const Mine& mine, int64_t element) {
  Block* block = blocks_[0].has(mine, element) ? &blocks_[0] : &blocks_[1];
  if (!block->has(mine, element)) fill(*block, mine, element / 16 * 16);
  Block& other = blocks_[block == &blocks_[0] ? 1 : 0];
  if (block->end < mine.region.size() && !other.has(mine, block->end)) fill(other, mine, block->end);
  return *block;
}

void Feed::fill(Block& block, const Mine& mine, int64_t begin) {
  block.data = mine.data;
  block.tensor = mine.tensor;
  block.piece = mine.piece;
  block.begin = begin;
  block.end = std::min(mine.region.size(), begin + chunk_elements(mine.dtype));
  block.memory.copy_from(mine.data + bytes(begin, mine.dtype), bytes(block.end - begin, mine.dtype), mine.device);
}

}  // namespace shardow::file
