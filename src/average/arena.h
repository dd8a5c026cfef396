// Where averages lie in memory, so that an update's streams don't disturb one another.
#pragma once

#include <cstdint>

namespace shardow::average {

/// Bytes from one average's first byte to the next one's, for averages of `bytes` each (a multiple of 64) on a CPU.
///
/// Streams whose addresses agree modulo 64 MiB, to within about 8 MiB, were measured to run at a third of the speed of
/// others (docs/architecture.md), so large averages are spread evenly over that period. What lies between them is never
/// touched: address space, not memory.
int64_t arena_stride(int64_t bytes, int num_averages);

}  // namespace shardow::average
