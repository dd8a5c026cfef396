// swap() and cast() on the device: grids whose warps stride over groups.
#pragma once

#include "kernels/cuda_access.cuh"
#include "kernels/exchange.h"

namespace shardow::kernels::cuda {

template <class From, class To>
__global__ void cast_kernel(const From* from, To* to, int64_t count) {
  const Warp warp;
  for (int64_t begin = warp.index * kGroup; begin < count; begin += warp.of * kGroup)
    convert_group(warp.lane, count - begin, from + begin, to + begin);
}

/// Swaps words of 16 bits, which all four dtypes are made of.
__device__ inline void swap_group(int lane, int64_t left, uint16_t* a, uint16_t* b) {
  with_access<uint16_t>(aligned(a) && aligned(b), lane, left, [&](const auto& access) {
    uint16_t x[kPerLane], y[kPerLane];
    access.load(a, x);
    access.load(b, y);
    access.store(a, y);
    access.store(b, x);
  });
}

__device__ inline void exchange_group(int lane, int64_t left, uint16_t* parameter, uint32_t* average,
                                      Direction direction) {
  with_access<uint32_t>(aligned(parameter) && aligned(average), lane, left, [&](const auto& access) {
    uint16_t p[kPerLane];
    uint32_t e[kPerLane];
    access.load(parameter, p);
    access.load(average, e);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) exchange(p[j], e[j], direction);
    access.store(parameter, p);
    access.store(average, e);
  });
}

/// Groups are counted over all pairs, so that small tensors share a grid.
__global__ void swap_kernel(const __grid_constant__ Pairs pairs) {
  const Warp warp;
  int64_t group = warp.index;
  for (int i = 0; i < pairs.count; ++i) {
    const Pair& pair = pairs.pairs[i];
    const int64_t groups = (pair.count + kGroup - 1) / kGroup;
    for (; group < groups; group += warp.of) {
      const int64_t begin = group * kGroup, left = pair.count - begin;
      if (pair.exchange) {
        exchange_group(warp.lane, left, pair.parameter + begin, static_cast<uint32_t*>(pair.average) + begin,
                       pairs.direction);
      } else {
        swap_group(warp.lane, left, pair.parameter + begin, static_cast<uint16_t*>(pair.average) + begin);
      }
    }
    group -= groups;
  }
}

}  // namespace shardow::kernels::cuda
