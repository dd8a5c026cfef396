// What a save writes from: this rank's parts of tensors, as bytes of the file's dtype in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "file/device.h"
#include "file/producer.h"
#include "shardow/checkpoint.h"
#include "shardow/region.h"
#include "shardow/tensor_view.h"

namespace shardow::file {

inline constexpr int64_t kChunkBytes = int64_t{8} << 20;  ///< of one read, write or copy

/// This rank's part of a tensor: the region's elements, one after another, from `data`, or from `producer`.
struct Mine {
  size_t tensor, piece;
  Region region;
  const std::byte* data;
  DType dtype;
  Device device;
  const Producer* producer = nullptr;
  std::string name = {};  // for the producer
};

/// Elements that fit into a chunk, a multiple of 16.
int64_t chunk_elements(DType dtype) noexcept;

/// Not for several threads at once. Holds a chunk of memory at most (two of what is produced and then cast), and two
/// pinned ones where tensors are on a device: while one is used, the next one is copied.
class Feed {
 public:
  /// Elements [begin, end) of the part, a chunk of them at most, as `dtype`. Valid until the next call.
  std::span<const std::byte> get(const Mine& mine, int64_t begin, int64_t end, DType dtype);

  /// Any number of them into `to`.
  void copy(const Mine& mine, int64_t begin, int64_t end, DType dtype, std::byte* to);

 private:
  /// Elements [begin, end) of a part on a device.
  struct Block {
    Pinned memory;
    const std::byte* data = nullptr;
    size_t tensor = 0, piece = 0;  // several views may lie at one address
    int64_t begin = 0, end = 0;

    bool has(const Mine& mine, int64_t element) const {
      return data == mine.data && tensor == mine.tensor && piece == mine.piece && begin <= element && element < end;
    }
  };

  void produce(const Mine& mine, int64_t begin, int64_t end, DType dtype, std::byte* to);
  Block& block_at(const Mine& mine, int64_t element);
  static void fill(Block& block, const Mine& mine, int64_t begin);

  std::vector<std::byte> buffer_, produced_;
  Block blocks_[2];
};

}  // namespace shardow::file
