// update() on the device. The unit of work is a tile: a stretch of one chunk, handled by one warp. Tiles of any chunks
// share a block, so thousands of tiny tensors fill the machine as well as one large one, and everything that differs
// between chunks (dtypes, pointers, noise keys) is uniform in a warp.
//
//   1. The warp reads its tile and chunk, and its first lanes resolve the formulas and draw the keys into shared
//   memory.
//   2. Groups of 256 elements, eight per lane: the parameters are loaded and converted once; then per average one
//   switch. The next average is on its way
//      while one is computed, so that a lane always has 32 bytes or more of averages in flight, a multiprocessor 64 KB.
//   3. What is left, less than a group, element by element.
#pragma once

#include "kernels/arithmetic.h"
#include "kernels/cuda_access.cuh"
#include "kernels/cuda_work.h"

namespace shardow::kernels::cuda {

/// One warp's tile, made ready; in shared memory.
struct Prepared {
  const void* parameter;
  void* averages[kMaxAverages];
  double weights[kMaxAverages], decays[kMaxAverages];  // values of the computing type
  NoiseKey keys[kMaxAverages];
  Op ops[kMaxAverages];
};

template <class P, class S>
struct Body {
  using T = Computing<S>;

  const Prepared& tile;
  int64_t count;
  uint32_t low;  ///< of the global index of the tile's first element
  int num_averages;
  bool hold;
  Access access;

  __device__ S* average(int k) const { return static_cast<S*>(tile.averages[k]); }

  /// The whole group from element `begin` on. Returns how many parameters of this lane were not finite.
  __device__ int group(int64_t begin) const {
    P raw[kPerLane];
    S e[kPerLane], following[kPerLane];
    access.load(static_cast<const P*>(tile.parameter) + begin, raw);
    access.load(average(0) + begin, e);
    T p[kPerLane];
    uint32_t held = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      p[j] = convert<T>(raw[j]);
      if (!is_finite(p[j])) held |= 1u << j;
    }
    const int non_finite = __popc(held);
    if (!hold) held = 0;
#pragma unroll 1
    for (int k = 0; k < num_averages; ++k) {
      if (k + 1 < num_averages) access.load(average(k + 1) + begin, following);
      with_op(tile.ops[k],
              [&]<Op kOp>() { next_all<kOp>(k, low + static_cast<uint32_t>(begin + access.first), p, held, e); });
      access.store(average(k) + begin, e);
      memcpy(e, following, sizeof(e));
    }
    return non_finite;
  }

  template <Op kOp>
  __device__ void next_all(int k, uint32_t index, const T (&p)[kPerLane], uint32_t held, S (&e)[kPerLane]) const {
    const T weight = static_cast<T>(tile.weights[k]), decay = static_cast<T>(tile.decays[k]);
    const NoiseKey key = tile.keys[k];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint32_t noise = draws(kOp) ? noise_bits(key, index + static_cast<uint32_t>(j * access.stride)) : 0;
      const S value = next_as<kOp, S>(weight, decay, p[j], e[j], noise);
      if (!(held >> j & 1)) e[j] = value;
    }
  }

  __device__ int element(int64_t i) const {
    const T p = convert<T>(static_cast<const P*>(tile.parameter)[i]);
    const bool finite = is_finite(p);
    if (!finite && hold) return 1;
#pragma unroll 1
    for (int k = 0; k < num_averages; ++k) {
      S& e = average(k)[i];
      const Formula<T> formula{tile.ops[k], static_cast<T>(tile.weights[k]), static_cast<T>(tile.decays[k])};
      e = next<S>(formula, p, e, draws(formula.op) ? noise_bits(tile.keys[k], low + static_cast<uint32_t>(i)) : 0);
    }
    return finite ? 0 : 1;
  }

  __device__ int run(int lane) const {
    int non_finite = 0;
    int64_t i = 0;
#pragma unroll 1
    for (; i + kGroup <= count; i += kGroup) non_finite += group(i);
#pragma unroll 1
    for (i += lane; i < count; i += kLanes) non_finite += element(i);
    return non_finite;
  }
};

/// Fills the warp's Prepared, lane k for average k. Returns whether all pointers allow 16-byte accesses.
template <class P, class S>
__device__ bool prepare(const Chunk& chunk, const Tile& tile, const Step& step, int lane, Prepared& out) {
  bool good = true;
  if (lane == 0) {
    out.parameter = static_cast<const P*>(chunk.parameter) + tile.begin;
    good = aligned(out.parameter);
  }
  if (lane < step.num_averages) {
    const Formula<Computing<S>> formula = resolve<S>(step.averages.data()[lane]);
    void* const average = static_cast<S*>(chunk.averages.data()[lane]) + tile.begin;
    out.averages[lane] = average;
    out.ops[lane] = formula.op;
    out.weights[lane] = static_cast<double>(formula.weight);
    out.decays[lane] = static_cast<double>(formula.decay);
    out.keys[lane] =
        noise_key(step.seed, step.step, chunk.tensor, lane, static_cast<uint32_t>(chunk.global_begin >> 32));
    good = good && aligned(average);
  }
  __syncwarp();
  return __all_sync(0xffffffffu, good);
}

template <class P, class S>
__device__ int update_tile(const Chunk& chunk, const Tile& tile, const Step& step, int lane, Prepared& prepared) {
  const bool contiguous = prepare<P, S>(chunk, tile, step, lane, prepared);
  const uint32_t low = static_cast<uint32_t>(chunk.global_begin + tile.begin);
  return Body<P, S>{prepared, tile.count, low, step.num_averages, step.hold, Access(contiguous, lane)}.run(lane);
}

template <class T>
inline constexpr DType dtype_of = std::is_same_v<T, float>  ? DType::kF32
                                  : std::is_same_v<T, BF16> ? DType::kBF16
                                  : std::is_same_v<T, F16>  ? DType::kF16
                                                            : DType::kF64;

/// With the parameters' own type, one of P.
template <class S, class... P>
__device__ int update_any(const Chunk& chunk, const Tile& tile, const Step& step, int lane, Prepared& prepared) {
  if constexpr (sizeof...(P) == 1) return (update_tile<P, S>(chunk, tile, step, lane, prepared), ...);
  int non_finite = 0;
  static_cast<void>(((chunk.parameter_dtype == dtype_of<P> &&
                      (non_finite = update_tile<P, S>(chunk, tile, step, lane, prepared), true)) ||
                     ...));
  return non_finite;
}

/// Blocks per multiprocessor. Four leave a thread 64 registers, enough for one pair of types that is computed in float;
/// integer steps and several types in one kernel need more.
template <class S, class... P>
inline constexpr int kBlocks = std::is_same_v<S, double>            ? 2
                               : is_16_bit<S> || (sizeof...(P) > 1) ? 3
                                                                    : 4;

/// The sum over a warp, in its first lane at least. One instruction from sm_80 on.
__device__ inline unsigned sum_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, value);
#else
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
  return value;
#endif
}

/// Averages of type S, parameters of the types P. With `replay` (device memory), which a captured graph keeps, what
/// lies there counts in place of the other two.
template <class S, class... P>
__global__ void __launch_bounds__(kThreads, kBlocks<S, P...>)
    update_kernel(const __grid_constant__ Work work, const __grid_constant__ Step step, const Replay* replay) {
  __shared__ Prepared prepared[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const uint64_t index = uint64_t{blockIdx.x} * kWarps + static_cast<uint64_t>(warp);
  const Step& used = replay != nullptr ? replay->step : step;
  if (used.num_averages == 0) return;
  const Work table = replay != nullptr ? replay->work : work;
  if (index >= table.num_tiles) return;
  const Tile tile = table.tiles[index];
  const int met = update_any<S, P...>(table.chunks[tile.chunk], tile, used, lane, prepared[warp]);
  const unsigned non_finite = sum_of_warp(static_cast<unsigned>(met));
  if (lane == 0 && non_finite > 0) {
    atomicAdd(&table.tally->non_finite, static_cast<unsigned long long>(non_finite));
    atomicMax(&table.tally->last_chunk, 0xffffffffu - tile.chunk);
  }
}

}  // namespace shardow::kernels::cuda
