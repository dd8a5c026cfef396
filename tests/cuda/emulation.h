// Kernels on the host: the words of CUDA's language for g++. Each thread of a warp is a fiber (emulation.cc), so that a
// warp's lanes meet where the kernel says so, and come there in any order.
//
// What this shows: indexing, tails, tallies, noise, what lanes tell each other, alignment of 16-byte accesses. What it
// can't show is in docs/architecture.md.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local  // poisoned at a block's begin (emulation.cc)

#pragma GCC visibility push(default)

struct Dimension {
  unsigned x;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline thread_local Dimension threadIdx, blockIdx, blockDim, gridDim;

namespace shardow::fake {

using Random = std::mt19937_64;

/// Ends the process: something would go wrong on a device, or has in the test.
[[noreturn]] inline void give_up(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::abort();
}

/// `body` for each thread of the block; warps and lanes in an order that `random` draws, where it is given.
void run_block(unsigned grid, unsigned block, unsigned index, const std::function<void()>& body,
               Random* random = nullptr);

/// Aborts where an address is not a multiple of the access's size, as a device does.
void check_access(const void* address, size_t bytes);

enum class Meeting { kSync, kAll };

/// All lanes of the warp arrive; returns whether all of them agree. Aborts where lanes come to different meetings or
/// one has ended.
bool meet(Meeting meeting, unsigned mask, bool agrees);

/// A kernel on the host: the same sources, compiled over this (twins.cc).
struct Twin {
  std::vector<size_t> sizes;  ///< of the kernel's parameters, in bytes
  /// What each thread does, with copies of the arguments.
  std::function<std::function<void()>(void** arguments)> bind;
};

char touch_shared_memory();  ///< of this thread, so that it is there; changes a byte of it, and returns what that was

/// By the name that the engine asks NVRTC for, "update_kernel<float, BF16>", or by the mangled one; null: none.
const Twin* twin_of(const std::string& name);

/// "update_kernel<float, BF16>" of "_ZN7shardow7kernels...", which NVRTC and g++ mangle alike.
std::string plain_name(const std::string& mangled);

}  // namespace shardow::fake

#pragma GCC visibility pop

template <class T>
T __ldcg(const T* from) {
  shardow::fake::check_access(from, sizeof(T));
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void __stcg(T* to, const T& value) {
  shardow::fake::check_access(to, sizeof(T));
  std::memcpy(to, &value, sizeof(T));
}

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  shardow::fake::meet(shardow::fake::Meeting::kSync, mask, true);
}

inline int __all_sync(unsigned mask, int predicate) {
  return shardow::fake::meet(shardow::fake::Meeting::kAll, mask, predicate != 0) ? 1 : 0;
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
