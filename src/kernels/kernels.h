// The averaging kernels: what the average layer asks of a device.
//
// A chunk is a stretch of elements contiguous in memory and, where noise is drawn, in the global tensor. One update is
// one call with a table of chunks: every parameter is read once, every average read and written once. Kernels are
// noexcept, allocate nothing and know neither names nor ranks. The arithmetic is defined once, in arithmetic.h;
// reference.cc applies it element by element and every other kernel equals it bit for bit. On a CPU each call computes
// in IEEE 754's default environment, whatever its thread has set.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/step.h"
#include "shardow/tensor_view.h"

namespace shardow::kernels {

/// Elements whose parameter was NaN or Inf (after conversion to the computing dtype), counted whether held or not.
struct Tally {
  int64_t non_finite = 0;
  int64_t first_chunk = -1;  ///< index in the call's span of the first chunk with such an element
};

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
