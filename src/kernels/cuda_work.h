// The arguments of the kernels for CUDA devices: a table in device memory, cut into tiles. Host and device read this
// header.
#pragma once

#include <cstdint>

#include "kernels/step.h"

namespace shardow::kernels::cuda {

inline constexpr int kLanes = 32, kPerLane = 8, kGroup = kLanes * kPerLane;  // elements of a lane's group, of a warp's
inline constexpr int kThreads = 256, kWarps = kThreads / kLanes;

/// The unit of work, handled by one warp: groups of one chunk, the first at `begin`, each `stride` elements after the
/// one before, up to `count` elements from there.
struct Tile {
  uint32_t chunk, count, stride;
  int64_t begin;
};

/// `last_chunk` is 2^32 - 1 - (index of the first chunk with a value that is not finite), so that zero means none.
struct DeviceTally {
  unsigned long long non_finite;
  unsigned int last_chunk;
};

/// An update's memory, all of it on the device.
struct Work {
  const Chunk* chunks;
  const Tile* tiles;
  uint32_t num_tiles;
  DeviceTally* tally;
};

/// Words of 16 bits and their average's; or bfloat16 parameters with float32 averages, which are exchanged by their
/// bits.
struct Pair {
  uint16_t* parameter;
  void* average;
  int64_t count;
  bool exchange;
};

/// The argument of a swap: as many as the 4 KB that a launch may be given hold.
struct Pairs {
  static constexpr int kMost = 126;
  Pair pairs[kMost];
  int count;
  Direction direction;
};

/// The arguments of an update: given with a launch, or in device memory at the one address that a graph keeps. Zeros:
/// nothing.
struct UpdateArguments {
  Step step;
  Work work;
};

}  // namespace shardow::kernels::cuda
