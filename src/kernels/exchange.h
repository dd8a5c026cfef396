// Weights and averages exchanged in place, without a third buffer and without losing a bit.
//
// A bfloat16 parameter P and a float32 average A hold 48 bits together. Into the weights goes the bfloat16 nearest to A
// (half away from zero), into the average's slot P and A's lower half: (P << 16) | lo. Rounding up is undone by looking
// at lo, so all that is needed is that "round up" be a bijection of the upper half's magnitude x for lo >= 2^15:
//
//   x <= 0x7f7f (finite)                           x + 1
//   x = 0x7f80 (a signalling NaN, as lo > 0; never made by arithmetic)   0, the only value left
//   x >= 0x7f81 (NaN)                              x
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/bits.h"
#include "kernels/step.h"

namespace shardow::kernels {

SHARDOW_HD uint32_t round_up(uint32_t magnitude) {
  if (magnitude < 0x7f80) return magnitude + 1;
  return magnitude == 0x7f80 ? 0 : magnitude;
}

SHARDOW_HD uint32_t undo_round_up(uint32_t magnitude) {
  if (magnitude == 0) return 0x7f80;
  return magnitude <= 0x7f80 ? magnitude - 1 : magnitude;
}

/// A bfloat16 parameter with a float32 average, both by their bits.
SHARDOW_HD void exchange(uint16_t& parameter, uint32_t& average, Direction direction) {
  const uint32_t lo = average & 0xffff;
  const uint32_t from = direction == Direction::kIn ? average >> 16 : parameter;
  uint32_t to = from;
  if (lo >= 0x8000)
    to = (from & 0x8000) | (direction == Direction::kIn ? round_up(from & 0x7fff) : undo_round_up(from & 0x7fff));
  if (direction == Direction::kIn) {
    average = static_cast<uint32_t>(parameter) << 16 | lo;
    parameter = static_cast<uint16_t>(to);
  } else {
    parameter = static_cast<uint16_t>(average >> 16);
    average = to << 16 | lo;
  }
}

}  // namespace shardow::kernels
