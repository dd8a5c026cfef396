// Kernels on the host: the words of CUDA's language for g++, and launches. Each thread of a warp is a fiber
// (emulation.cc), so that a warp's lanes really stand where they meet, and come there in any order.
//
// What this shows: indexing, tails, tallies, noise, what lanes tell each other, alignment of 16-byte accesses. What it
// can't show stands in docs/architecture.md.
#pragma once

#include <cstring>
#include <functional>
#include <tuple>
#include <typeinfo>
#include <vector>

// As part of <cuda_runtime.h>, which this is the end of.

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

namespace shardow::fake {

/// Aborts where an address is not a multiple of the access's size, as a device does.
void check_access(const void* address, size_t bytes);

enum class Meeting { kSync, kAll, kShuffle };

/// All lanes of the warp arrive; returns what they brought. Aborts where lanes come to different meetings or one has
/// ended.
const unsigned* meet(Meeting meeting, unsigned mask, unsigned brought);

unsigned lane_number();

struct Kernel {
  const void* function;
  std::vector<std::pair<const std::type_info*, const void*>> arguments;
  std::function<void()> body;  ///< of one thread, with its own copy of the arguments
};

cudaError_t launch(dim3 grid, dim3 block, cudaStream_t stream, const Kernel& kernel);

}  // namespace shardow::fake

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  void* attrs = nullptr;
  unsigned numAttrs = 0;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... given) {
  const std::tuple<Parameters...> arguments(std::forward<Arguments>(given)...);
  shardow::fake::Kernel one{reinterpret_cast<const void*>(kernel), {}, [=] { std::apply(kernel, arguments); }};
  std::apply([&](const auto&... argument) { (one.arguments.emplace_back(&typeid(argument), &argument), ...); },
             arguments);
  return shardow::fake::launch(config->gridDim, config->blockDim, config->stream, one);
}

template <class T>
T __ldcs(const T* from) {
  shardow::fake::check_access(from, sizeof(T));
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void __stcs(T* to, const T& value) {
  shardow::fake::check_access(to, sizeof(T));
  std::memcpy(to, &value, sizeof(T));
}

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  shardow::fake::meet(shardow::fake::Meeting::kSync, mask, 0);
}

inline int __all_sync(unsigned mask, int predicate) {
  const unsigned* const brought = shardow::fake::meet(shardow::fake::Meeting::kAll, mask, predicate != 0);
  for (int lane = 0; lane < 32; ++lane) {
    if (brought[lane] == 0) return 0;
  }
  return 1;
}

/// A lane past the warp's end keeps its own value, as on a device.
inline unsigned __shfl_down_sync(unsigned mask, unsigned value, unsigned distance) {
  const unsigned* const brought = shardow::fake::meet(shardow::fake::Meeting::kShuffle, mask, value);
  const unsigned from = shardow::fake::lane_number() + distance;
  return from < 32 ? brought[from] : value;
}

template <class T>
T atomicAdd(T* to, T value) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

template <class T>
T atomicMax(T* to, T value) {
  T before = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (before < value &&
         !__atomic_compare_exchange_n(to, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
