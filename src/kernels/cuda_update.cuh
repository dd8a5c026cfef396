// update() on the device. The unit of work is a tile: a stretch of one chunk, handled by one warp. Tiles of any chunks
// share a block, so thousands of tiny tensors fill the machine as well as one large one, and everything that differs
// between chunks (dtypes, pointers, noise keys) is uniform in a warp.
//
//   1. The warp reads its tile and chunk, and its first lanes resolve the formulas and draw the keys into shared
//   memory.
//   2. Groups of 256 elements, eight per lane: the parameters are loaded and converted once; then per average one
//   switch. Whole groups at aligned addresses go in 16-byte accesses, others in single elements.
#pragma once

#include "kernels/arithmetic.h"
#include "kernels/cuda_access.cuh"
#include "kernels/cuda_work.h"

namespace shardow::kernels::cuda {

/// One warp's tile, made ready; in shared memory.
template <class S>
struct Prepared {
  const void* parameter;
  S* averages[kMaxAverages];
  Formula<Computing<S>> formulas[kMaxAverages];
  NoiseKey keys[kMaxAverages];
  unsigned non_finite;  ///< parameters met; here, since a register would be kept over the loop for it
};

template <class P, class S>
struct Body {
  using T = Computing<S>;

  Prepared<S>& tile;
  int count, stride;
  uint32_t low;  ///< of the global index of the tile's first element
  int num_averages;
  bool hold;
  int lane;

  /// The tile's groups from `begin` to `last`, which is where the last one begins or a little after. The next average
  /// is on its way while one is computed, and with kWide the next group's parameters and first average. Returns where
  /// the group after them begins.
  template <bool kWide>
  __device__ int update_groups(int begin, int last) const {
    P raw[kPerLane];
    S e[kPerLane], following[kPerLane];
    const auto load_first = [&](int at, S(&first)[kPerLane]) {
      const Access<S, kWide> access(lane, count - at);
      access.load(parameter(at), raw);
      access.load(average(0, at), first);
    };
    if (kWide && begin <= last) load_first(begin, e);
#pragma unroll 1
    for (; begin <= last; begin += stride) {
      if (!kWide) load_first(begin, e);
      const Access<S, kWide> access(lane, count - begin);
      T p[kPerLane];
      const uint32_t held = convert_parameters(raw, p);
#pragma unroll 1
      for (int k = 0; k < num_averages; ++k) {
        if (k + 1 < num_averages) {
          access.load(average(k + 1, begin), following);
        } else if (kWide && begin + stride <= last) {
          load_first(begin + stride, following);
        }
        update_average(k, begin, access, p, held, e);
        memcpy(e, following, sizeof(e));
      }
    }
    return begin;
  }

  __device__ const P* parameter(int begin) const {
    return static_cast<const P*>(tile.parameter) + begin;
  }
  __device__ S* average(int k, int begin) const {
    return tile.averages[k] + begin;
  }

  /// Counts what is not finite. Returns those of the lane's elements, a bit each, whose averages are held.
  __device__ uint32_t convert_parameters(const P (&raw)[kPerLane], T (&p)[kPerLane]) const {
    uint32_t held = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      p[j] = convert<T>(raw[j]);
      if (!is_finite(p[j])) held |= 1u << j;
    }
    if (held != 0) atomicAdd(&tile.non_finite, static_cast<unsigned>(__popc(held)));
    return hold ? held : 0;
  }

  /// Average k of the group, whose elements e were, is stored.
  template <bool kWide>
  __device__ void update_average(int k, int begin, const Access<S, kWide>& access, const T (&p)[kPerLane],
                                 uint32_t held, S (&e)[kPerLane]) const {
    with_op<S>(tile.formulas[k].op, [&]<Op kOp>() {
      const T weight = tile.formulas[k].weight, decay = tile.formulas[k].decay;
      const NoiseKey key = tile.keys[k];
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const uint32_t index = low + static_cast<uint32_t>(begin + access.element(j));
        const uint32_t noise = draws(kOp) ? noise_bits(key, index) : 0;
        const S value = next_as<kOp, S>(weight, decay, p[j], e[j], noise);
        if (!(held >> j & 1)) e[j] = value;
      }
    });
    access.store(average(k, begin), e);
  }
};

/// Fills the warp's Prepared, lane k for average k. Returns whether all pointers allow 16-byte accesses.
template <class P, class S>
__device__ bool prepare(const Chunk& chunk, const Tile& tile, const Step& step, int lane, Prepared<S>& out) {
  bool good = true;
  if (lane == 0) {
    out.parameter = static_cast<const P*>(chunk.parameter) + tile.begin;
    out.non_finite = 0;
    good = aligned(out.parameter);
  }
  if (lane < step.num_averages) {
    out.formulas[lane] = resolve<S>(step.averages.data()[lane]);
    out.averages[lane] = static_cast<S*>(chunk.averages.data()[lane]) + tile.begin;
    out.keys[lane] =
        noise_key(step.seed, step.step, chunk.tensor, lane, static_cast<uint32_t>(chunk.global_begin >> 32));
    good = good && aligned(out.averages[lane]);
  }
  __syncwarp();
  return __all_sync(0xffffffffu, good);
}

template <class P, class S>
__device__ void update_tile(const Chunk& chunk, const Tile& tile, const Step& step, int lane, Prepared<S>& prepared) {
  const bool every_pointer_aligned = prepare<P, S>(chunk, tile, step, lane, prepared);
  const uint32_t low = static_cast<uint32_t>(chunk.global_begin + tile.begin);
  const int count = static_cast<int>(tile.count), stride = static_cast<int>(tile.stride);
  const Body<P, S> body{prepared, count, stride, low, step.num_averages, step.hold, lane};
  const int rest = every_pointer_aligned ? body.template update_groups<true>(0, count - kGroup) : 0;
  body.template update_groups<false>(rest, count - 1);
}

template <class T>
inline constexpr DType dtype_of = std::is_same_v<T, float>  ? DType::kF32
                                  : std::is_same_v<T, BF16> ? DType::kBF16
                                  : std::is_same_v<T, F16>  ? DType::kF16
                                                            : DType::kF64;

/// Calls visit.template operator()<type>() with the type of the chunk's parameter, one of P.
template <class... P, class Visit>
__device__ void with_parameter(const Chunk& chunk, const Visit& visit) {
  static_cast<void>(
      ((sizeof...(P) == 1 || chunk.parameter_dtype == dtype_of<P> ? (visit.template operator()<P>(), true) : false) ||
       ...));
}

/// Blocks per multiprocessor. Three leave a thread 80 registers, enough for what is computed in float; for the latest
/// generation the assembler's schedules take more.
#if __CUDA_ARCH__ >= 1200
inline constexpr int kMostBlocks = 2;
#else
inline constexpr int kMostBlocks = 3;
#endif
template <class S>
inline constexpr int kBlocks = kMostBlocks - (std::is_same_v<S, double> ? 1 : 0);

/// Copies the arguments that count into the warp's shared memory, a word a lane: those in device memory, where a graph
/// keeps their address, else those of the launch. Words are chosen here, and no addresses: of two addresses the NVRTCs
/// from 12.4 to 13.0 read a pointer from the launch's arguments, whichever is chosen.
__device__ inline const UpdateArguments& read_arguments(const UpdateArguments& launched, const UpdateArguments* kept,
                                                        int lane, UpdateArguments& to) {
  using Word = unsigned long long;
  constexpr int kWords = sizeof(UpdateArguments) / sizeof(Word);
  static_assert(kWords <= kLanes && kWords * sizeof(Word) == sizeof(UpdateArguments));
  if (lane < kWords) {
    Word word = reinterpret_cast<const Word*>(&launched)[lane];
    if (kept != nullptr) word = reinterpret_cast<const Word*>(kept)[lane];
    reinterpret_cast<Word*>(&to)[lane] = word;
  }
  __syncwarp();
  return to;
}

/// Averages of type S, parameters of the types P. `kept`, of a captured launch, is in device memory; null otherwise.
template <class S, class... P>
__global__ void __launch_bounds__(kThreads, kBlocks<S>)
    update_kernel(const __grid_constant__ UpdateArguments launched, const UpdateArguments* kept) {
  __shared__ UpdateArguments arguments[kWarps];
  __shared__ Prepared<S> prepared[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const uint64_t index = uint64_t{blockIdx.x} * kWarps + static_cast<uint64_t>(warp);
  const auto& [step, work] = read_arguments(launched, kept, lane, arguments[warp]);
  if (step.num_averages == 0 || index >= work.num_tiles) return;
  const Tile tile = work.tiles[index];
  const Chunk& chunk = work.chunks[tile.chunk];
  with_parameter<P...>(chunk, [&]<class Q>() { update_tile<Q, S>(chunk, tile, step, lane, prepared[warp]); });
  __syncwarp();
  if (lane == 0 && prepared[warp].non_finite > 0) {
    atomicAdd(&work.tally->non_finite, static_cast<unsigned long long>(prepared[warp].non_finite));
    atomicMax(&work.tally->last_chunk, 0xffffffffu - tile.chunk);
  }
}

/// Every average <- its parameter, rounded once.
template <class S, class... P>
__global__ void copy_kernel(const __grid_constant__ Work work, int num_averages) {
  const Warp warp;
  if (warp.index >= work.num_tiles) return;
  const Tile tile = work.tiles[warp.index];
  const Chunk& chunk = work.chunks[tile.chunk];
  with_parameter<P...>(chunk, [&]<class Q>() {
    const Q* const parameter = static_cast<const Q*>(chunk.parameter) + tile.begin;
    for (int k = 0; k < num_averages; ++k) {
      S* const average = static_cast<S*>(chunk.averages.data()[k]) + tile.begin;
      for (uint32_t begin = 0; begin < tile.count; begin += tile.stride)
        convert_group(warp.lane, tile.count - begin, parameter + begin, average + begin);
    }
  });
}

}  // namespace shardow::kernels::cuda
