// DType: what elements are made of. The kernels for devices read this header too, so it includes the C library's
// integers alone.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
namespace shardow {

enum class DType : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

}  // namespace shardow
#pragma GCC visibility pop
