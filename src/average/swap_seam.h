// For tests: what happens between any two steps of a swap.
#pragma once

namespace shardow::average {

/// Called between two steps wherever it is set; what it throws ends the swap there, as a failing device or allocation
/// would. Not for two threads.
inline void (*swap_seam)() = nullptr;

}  // namespace shardow::average
