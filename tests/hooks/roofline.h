// What the machine could do at best: the same stream of loads and stores as an update, with one max in place of the
// average. Benchmarks state every speed as a ratio to this one.
#pragma once

#include <span>

#include "kernels/kernels.h"

namespace shardow::kernels::roofline {

/// Reads every parameter, reads and writes every average (the values are changed: to the larger one), in
/// cpu::update()'s order and with its instruction set. Averages of 16 bits are not measured: their chunks are passed
/// over.
void update(std::span<const Chunk> chunks, int num_averages) noexcept;

}  // namespace shardow::kernels::roofline
