// The averaging kernels: what the average layer asks of a device.
//
// A chunk is a stretch of elements contiguous in memory and, where noise is drawn, in the global tensor. One update is
// one call with a table of chunks: every parameter is read once, every average read and written once. Kernels are
// noexcept, allocate nothing and know neither names nor ranks. The arithmetic is defined once, in arithmetic.h;
// reference.cc applies it element by element and every other kernel equals it bit for bit. On a CPU each call computes
// in IEEE 754's default environment, whatever its thread has set.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "shardow/tensor_view.h"

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

/// What all chunks of one update share. Trivially copyable: the CUDA kernel reads it from device memory.
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

/// Elements whose parameter was NaN or Inf (after conversion to the computing dtype), counted whether held or not.
struct Tally {
  int64_t non_finite = 0;
  int64_t first_chunk = -1;  ///< index in the call's span of the first chunk with such an element
};

/// To weights and back. kIn: the parameter's memory receives the average; kOut undoes it.
enum class Direction : uint8_t { kIn, kOut };

/// True where swap() is lossless without further memory: equal dtypes, and bfloat16 parameters with float32 averages.
bool swaps_in_place(DType parameter, DType average) noexcept;

/// The four floating dtypes that parameters may have.
bool is_averaged_dtype(DType dtype) noexcept;

namespace reference {  // plain loops over arithmetic.h
Tally update(std::span<const Chunk> chunks, const Step& step) noexcept;
void swap(void* parameter, DType parameter_dtype, void* average, DType average_dtype, int64_t count,
          Direction direction) noexcept;
void cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) noexcept;
}  // namespace reference

namespace cpu {  // Highway, dispatched at run time; targets without a fused multiply-add use the reference
Tally update(std::span<const Chunk> chunks, const Step& step) noexcept;
void swap(void* parameter, DType parameter_dtype, void* average, DType average_dtype, int64_t count,
          Direction direction) noexcept;
/// Round to nearest even; ranges that are equal or disjoint.
void cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) noexcept;
const char* target() noexcept;  ///< the instruction set in use
}  // namespace cpu

}  // namespace shardow::kernels
