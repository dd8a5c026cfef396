// swap() and cast() on the device: grids whose warps stride over groups.
#pragma once

#include "kernels/cuda_access.cuh"
#include "kernels/exchange.h"

namespace shardow::kernels::cuda {

/// Calls visit(begin, access) for each group of the warp's.
template <class S, class Visit>
__device__ void for_each_group(int64_t count, bool every_pointer_aligned, const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x / kLanes * kGroup;
  for (int64_t begin = warp * kGroup; begin < count; begin += step)
    visit(begin, Access<S>(every_pointer_aligned, lane, count - begin));
}

template <class From, class To>
__global__ void cast_kernel(const From* from, To* to, int64_t count) {
  for_each_group<To>(count, aligned(from) && aligned(to), [&](int64_t begin, const auto& access) {
    From in[kPerLane];
    To out[kPerLane];
    access.load(from + begin, in);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) out[j] = convert<To>(in[j]);
    access.store(to + begin, out);
  });
}

/// Ranges of 16-bit words, which all four dtypes are made of.
__global__ void swap_kernel(uint16_t* a, uint16_t* b, int64_t count) {
  for_each_group<uint16_t>(count, aligned(a) && aligned(b), [&](int64_t begin, const auto& access) {
    uint16_t x[kPerLane], y[kPerLane];
    access.load(a + begin, x);
    access.load(b + begin, y);
    access.store(a + begin, y);
    access.store(b + begin, x);
  });
}

__global__ void exchange_kernel(uint16_t* parameter, uint32_t* average, int64_t count, Direction direction) {
  const bool every_pointer_aligned = aligned(parameter) && aligned(average);
  for_each_group<uint32_t>(count, every_pointer_aligned, [&](int64_t begin, const auto& access) {
    uint16_t p[kPerLane];
    uint32_t e[kPerLane];
    access.load(parameter + begin, p);
    access.load(average + begin, e);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) exchange(p[j], e[j], direction);
    access.store(parameter + begin, p);
    access.store(average + begin, e);
  });
}

}  // namespace shardow::kernels::cuda
