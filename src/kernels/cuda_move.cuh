// swap() and cast() on the device: grids that stride over groups of eight elements per thread where the pointers allow
// 16-byte accesses, and over single elements elsewhere.
#pragma once

#include "kernels/cuda_access.cuh"
#include "kernels/exchange.h"

namespace shardow::kernels::cuda {

struct Stride {
  int64_t first, step;
};

__device__ inline Stride grid() {
  return {static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, static_cast<int64_t>(gridDim.x) * blockDim.x};
}

template <class From, class To>
__global__ void cast_kernel(const From* from, To* to, int64_t count) {
  const auto [first, step] = grid();
  const int64_t groups = aligned(from) && aligned(to) ? count / kPerLane : 0;
  for (int64_t g = first; g < groups; g += step) {
    From in[kPerLane];
    To out[kPerLane];
    load_16_bytes(from + g * kPerLane, in);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) out[j] = convert<To>(in[j]);
    store_16_bytes(to + g * kPerLane, out);
  }
  for (int64_t i = groups * kPerLane + first; i < count; i += step) to[i] = convert<To>(from[i]);
}

/// Ranges of 16-bit words, which all four dtypes are made of.
__global__ void swap_kernel(uint16_t* a, uint16_t* b, int64_t count) {
  const auto [first, step] = grid();
  const int64_t groups = aligned(a) && aligned(b) ? count / kPerLane : 0;
  for (int64_t g = first; g < groups; g += step) {
    uint16_t x[kPerLane], y[kPerLane];
    load_16_bytes(a + g * kPerLane, x);
    load_16_bytes(b + g * kPerLane, y);
    store_16_bytes(a + g * kPerLane, y);
    store_16_bytes(b + g * kPerLane, x);
  }
  for (int64_t i = groups * kPerLane + first; i < count; i += step) {
    const uint16_t x = a[i];
    a[i] = b[i];
    b[i] = x;
  }
}

__global__ void exchange_kernel(uint16_t* parameter, uint32_t* average, int64_t count, Direction direction) {
  const auto [first, step] = grid();
  const int64_t groups = aligned(parameter) && aligned(average) ? count / kPerLane : 0;
  for (int64_t g = first; g < groups; g += step) {
    uint16_t p[kPerLane];
    uint32_t e[kPerLane];
    load_16_bytes(parameter + g * kPerLane, p);
    load_16_bytes(average + g * kPerLane, e);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) exchange(p[j], e[j], direction);
    store_16_bytes(parameter + g * kPerLane, p);
    store_16_bytes(average + g * kPerLane, e);
  }
  for (int64_t i = groups * kPerLane + first; i < count; i += step) exchange(parameter[i], average[i], direction);
}

}  // namespace shardow::kernels::cuda
