// How a warp reads and writes: groups of 256 elements, eight a lane. Where every pointer allows 16-byte accesses a lane
// has pieces of 16 bytes of the type S, lane after lane, so that an access of the warp is a range without holes;
// elsewhere, and in a group that is not full, single elements, strided by the warp.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/bits.h"
#include "kernels/cuda_work.h"

namespace shardow::kernels::cuda {

/// A thread's warp among those of the grid.
struct Warp {
  int lane = static_cast<int>(threadIdx.x) % kLanes;
  int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes, of = int64_t{gridDim.x} * kWarps;
};

__device__ inline bool aligned(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0;
}

template <int kBytes>
using Word =
    std::conditional_t<kBytes == 2, uint16_t,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 8, uint2, uint4>>>;

/// `kCount` contiguous elements in the widest accesses.
template <int kCount, class T>
__device__ inline void load_piece(const T* from, T* to) {
  using Wide = Word<kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16>;
#pragma unroll
  for (int i = 0; i < static_cast<int>(kCount * sizeof(T) / sizeof(Wide)); ++i) {
    const Wide word = __ldcg(reinterpret_cast<const Wide*>(from) + i);
    memcpy(to + i * (sizeof(Wide) / sizeof(T)), &word, sizeof(Wide));
  }
}

template <int kCount, class T>
__device__ inline void store_piece(T* to, const T* from) {
  using Wide = Word<kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16>;
#pragma unroll
  for (int i = 0; i < static_cast<int>(kCount * sizeof(T) / sizeof(Wide)); ++i) {
    Wide word;
    memcpy(&word, from + i * (sizeof(Wide) / sizeof(T)), sizeof(Wide));
    __stcg(reinterpret_cast<Wide*>(to) + i, word);
  }
}

/// A lane's elements of one group, of which `left` are there: with kWide, all.
template <class S, bool kWide>
class Access {
 public:
  __device__ explicit Access(int lane, int64_t left = kGroup)
      : left_(left < kGroup ? static_cast<int>(left) : kGroup), first_(kWide ? lane * kPiece : lane) {}

  /// Where the lane's j-th element is in the group.
  __device__ int element(int j) const {
    return first_ + (kWide ? j / kPiece * (kPiece * kLanes) + j % kPiece : j * kLanes);
  }

  /// Zeros for elements that are not there.
  template <class T>
  __device__ void load(const T* group, T (&to)[kPerLane]) const {
#pragma unroll
    for (int j = 0; j < kPerLane; j += kPiece) {
      if constexpr (!kWide) to[j] = T{};
      if (kWide || element(j) < left_) load_piece<kPiece>(group + element(j), to + j);
    }
  }

  template <class T>
  __device__ void store(T* group, const T (&from)[kPerLane]) const {
#pragma unroll
    for (int j = 0; j < kPerLane; j += kPiece) {
      if (kWide || element(j) < left_) store_piece<kPiece>(group + element(j), from + j);
    }
  }

 private:
  static constexpr int kPiece = kWide ? 16 / sizeof(S) : 1;

  int left_, first_;
};

/// Calls visit(access) with the widest access that a group of `left` elements allows.
template <class S, class Visit>
__device__ inline void with_access(bool every_pointer_aligned, int lane, int64_t left, const Visit& visit) {
  if (every_pointer_aligned && left >= kGroup) {
    visit(Access<S, true>(lane));
  } else {
    visit(Access<S, false>(lane, left));
  }
}

/// A group of `to` <- the same of `from`, rounded once.
template <class From, class To>
__device__ inline void convert_group(int lane, int64_t left, const From* from, To* to) {
  with_access<To>(aligned(from) && aligned(to), lane, left, [&](const auto& access) {
    From in[kPerLane];
    To out[kPerLane];
    access.load(from, in);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) out[j] = convert<To>(in[j]);
    access.store(to, out);
  });
}

}  // namespace shardow::kernels::cuda
