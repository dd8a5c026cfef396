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

/// Words of 16 bits, which all four dtypes are made of.
__device__ inline void exchange(uint16_t& parameter, uint16_t& average, Direction) {
  const uint16_t before = parameter;
  parameter = average;
  average = before;
}

template <class A>
__device__ inline void exchange_group(int lane, int64_t left, uint16_t* parameter, A* average, Direction direction) {
  with_access<A>(aligned(parameter) && aligned(average), lane, left, [&](const auto& access) {
    uint16_t p[kPerLane];
    A e[kPerLane];
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
        exchange_group(warp.lane, left, pair.parameter + begin, static_cast<uint16_t*>(pair.average) + begin,
                       pairs.direction);
      }
    }
    group -= groups;
  }
}

}  // namespace shardow::kernels::cuda
