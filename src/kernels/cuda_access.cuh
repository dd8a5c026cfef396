// How a warp reads and writes: eight elements per lane and group, streaming (each byte is touched once per update, so
// it should not displace the model in the L2 cache). Contiguous where every pointer allows 16-byte accesses, else
// strided by the warp, which coalesces as well, in narrower accesses.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/bits.h"
#include "kernels/cuda_work.h"

namespace shardow::kernels::cuda {

__device__ inline bool aligned(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0;
}

template <class T>
using Word = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

/// Eight contiguous elements in 16-byte accesses.
template <class T>
__device__ inline void load_16_bytes(const T* from, T (&to)[kPerLane]) {
  uint4 words[sizeof(to) / 16];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(to) / 16); ++i)
    words[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
  memcpy(to, words, sizeof(to));
}

template <class T>
__device__ inline void store_16_bytes(T* to, const T (&from)[kPerLane]) {
  uint4 words[sizeof(from) / 16];
  memcpy(words, from, sizeof(from));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(from) / 16); ++i) __stcs(reinterpret_cast<uint4*>(to) + i, words[i]);
}

/// Which elements of a warp's group a lane has: first, first + stride, ...
struct Access {
  bool contiguous;
  int first, stride;

  __device__ Access(bool every_pointer_aligned, int lane)
      : contiguous(every_pointer_aligned),
        first(contiguous ? lane * kPerLane : lane),
        stride(contiguous ? 1 : kLanes) {}

  template <class T>
  __device__ void load(const T* group, T (&to)[kPerLane]) const {
    if (contiguous) {
      load_16_bytes(group + first, to);
      return;
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const Word<T> word = __ldcs(reinterpret_cast<const Word<T>*>(group) + first + j * stride);
      memcpy(&to[j], &word, sizeof(T));
    }
  }

  template <class T>
  __device__ void store(T* group, const T (&from)[kPerLane]) const {
    if (contiguous) {
      store_16_bytes(group + first, from);
      return;
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      Word<T> word;
      memcpy(&word, &from[j], sizeof(T));
      __stcs(reinterpret_cast<Word<T>*>(group) + first + j * stride, word);
    }
  }
};

}  // namespace shardow::kernels::cuda
