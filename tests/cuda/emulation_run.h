// One block of a kernel, run on the calling thread.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <random>

namespace shardow::fake {

using Random = std::mt19937_64;

/// `body` for each thread of the block; warps and lanes in an order that `random` draws, where it is given.
void run_block(dim3 grid, dim3 block, unsigned index, const std::function<void()>& body, Random* random);

}  // namespace shardow::fake
