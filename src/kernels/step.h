// The arguments of an update: the numbers that all chunks share, and the chunks. Host and device read this header.
#pragma once

#include <array>
#include <cstdint>

#include "shardow/detail/dtype.h"

namespace shardow::kernels {

inline constexpr int kMaxAverages = 8;

/// How one average of one update is computed; see arithmetic.h for the formulas.
enum class Form : uint8_t {
  kCopy,
  kLerp,
  kMulAdd,
  kTwoProducts,
  kDifference,
  kFusedDifference,
  kQuotient,
  kStochastic
};

/// The numbers that all chunks of one update share. Trivially copyable: the CUDA kernel reads it from device memory.
struct Step {
  struct One {
    Form form;
    double decay, weight;  ///< rounded once by the kernel, to the dtype it computes in
  };
  std::array<One, kMaxAverages> averages;
  int32_t num_averages;
  bool hold;  ///< elements whose parameter is not finite keep their averages
  uint64_t seed;
  int64_t step;  ///< the counter of the noise
};

struct Chunk {
  const void* parameter;
  std::array<void*, kMaxAverages> averages;
  int64_t count;         ///< elements
  int64_t global_begin;  ///< index of the first element in the global tensor; a chunk does not cross a multiple of 2^32
  uint64_t tensor;       ///< tells the noise of different tensors apart
  DType parameter_dtype;  ///< kF32, kBF16, kF16, kF64
  DType average_dtype;    ///< kF32, kF64, kBF16, kF16
};

/// To weights and back. kIn: the parameter's memory receives the average; kOut undoes it.
enum class Direction : uint8_t { kIn, kOut };

}  // namespace shardow::kernels
