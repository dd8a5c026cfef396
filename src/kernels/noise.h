// Noise by counter: 32 bits for (seed, step, tensor, which average, global element index), the same wherever and in
// whatever order an element is computed.
//
//   1. The long part of the address (everything but the index's low 32 bits) becomes a 64-bit key once per chunk, by
//   SplitMix64
//      (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
//   2. The index's low word walks a Weyl sequence, so that vector code advances by one addition, and is mixed by two
//   multiplications with the constants of
//      Chris Wellons' "lowbias32" (hash prospector). The key enters twice, before and between the multiplications: with
//      one entry the noise of two steps would be one sequence, shifted.
//
// For a fixed key this is a bijection of the index: over 2^32 elements each value occurs once.
#pragma once

#include <cstdint>

#include "kernels/bits.h"

namespace shardow::kernels {

inline constexpr uint32_t kWeyl = 0x9e3779b9, kMix1 = 0x7feb352d, kMix2 = 0x846ca68b;

struct NoiseKey {
  uint32_t start, mix;
};

SHARDOW_HD uint64_t split_mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

/// `high` is the element index's upper word, which is one for all elements of a chunk.
SHARDOW_HD NoiseKey noise_key(uint64_t seed, int64_t step, uint64_t tensor, int average, uint32_t high) {
  uint64_t key = split_mix(seed);
  key = split_mix(key ^ static_cast<uint64_t>(step));
  key = split_mix(key ^ tensor);
  key = split_mix(key ^ (static_cast<uint64_t>(average) << 32 | high));
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

SHARDOW_HD uint32_t noise_bits(NoiseKey key, uint32_t low) {
  uint32_t x = low * kWeyl + key.start;
  x = (x ^ x >> 16) * kMix1;
  x = (x ^ x >> 15 ^ key.mix) * kMix2;
  return x ^ x >> 16;
}

/// An odd integer in [-65535, 65535], uniform: times 2^-17 a number in (-1/2, 1/2) whose mean is exactly 0. It uses the
/// noise's upper 16 bits.
SHARDOW_HD int32_t odd_draw(uint32_t noise) {
  return static_cast<int32_t>(noise) >> 15 | 1;
}

/// Uniform in [0, 65535], from the lower 16 bits, which odd_draw() leaves alone.
SHARDOW_HD uint32_t second_draw(uint32_t noise) {
  return noise & 0xffff;
}

}  // namespace shardow::kernels
