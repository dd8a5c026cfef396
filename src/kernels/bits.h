// Floating formats by their bits: bfloat16 and float16 without compiler support (clang 14 has no _Float16), and
// conversions that give the same bits on every device. Rounding is to nearest, ties to even. A NaN keeps its sign and
// the upper bits of its payload, becomes quiet, and never becomes Inf; only the widening of bfloat16, a plain shift,
// leaves it as it is.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#define SHARDOW_HD __host__ __device__ inline
#else
#define SHARDOW_HD inline
#endif

namespace shardow::kernels {

/// Storage of an element; arithmetic is done in float or double.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

SHARDOW_HD uint32_t bits_of(float x) {
  return __builtin_bit_cast(uint32_t, x);
}
SHARDOW_HD uint64_t bits_of(double x) {
  return __builtin_bit_cast(uint64_t, x);
}
SHARDOW_HD float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
SHARDOW_HD double double_of(uint64_t bits) {
  return __builtin_bit_cast(double, bits);
}

SHARDOW_HD float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
SHARDOW_HD double fused(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __fma_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

SHARDOW_HD bool is_finite(float x) {
  return (bits_of(x) & 0x7f800000u) != 0x7f800000u;
}
SHARDOW_HD bool is_finite(double x) {
  return (bits_of(x) & 0x7ff0000000000000u) != 0x7ff0000000000000u;
}

SHARDOW_HD double widen(float x) {
  if (x == x) return static_cast<double>(x);
  const uint64_t bits = bits_of(x);
  return double_of((bits >> 31) << 63 | 0x7ff8000000000000u | (bits & 0x7fffff) << 29);
}

SHARDOW_HD float narrow(double x) {
  if (x == x) return static_cast<float>(x);
  const uint64_t bits = bits_of(x);
  return float_of(static_cast<uint32_t>(bits >> 63) << 31 | 0x7fc00000u | static_cast<uint32_t>(bits >> 29 & 0x7fffff));
}

/// To the nearest float, but an inexact result has its last bit set, so that a second rounding to 16 bits ends where a
/// single one would.
SHARDOW_HD float narrow_to_odd(double x) {
  const float nearest = narrow(x);
  const double back = widen(nearest);
  if (back == x || x != x) return nearest;
  const double magnitude = double_of(bits_of(x) & ~(uint64_t{1} << 63)),
               back_magnitude = double_of(bits_of(back) & ~(uint64_t{1} << 63));
  return float_of((bits_of(nearest) - (back_magnitude > magnitude ? 1 : 0)) | 1);
}

SHARDOW_HD float to_float(BF16 x) {
  return float_of(static_cast<uint32_t>(x.bits) << 16);
}

SHARDOW_HD float to_float(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  // The exponent's bias differs by 112; multiplying by a power of two also makes subnormals right.
  uint32_t bits = bits_of(float_of(magnitude << 13) * 0x1p112f);
  if (magnitude >= 0x7c00) bits = 0x7f800000 | (magnitude & 0x3ff) << 13 | (magnitude > 0x7c00 ? 0x400000 : 0);
  return float_of(sign | bits);
}

SHARDOW_HD BF16 to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

SHARDOW_HD F16 to_f16(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, magnitude = bits_of(x) & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | (magnitude >> 13 & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // 65520 and above
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: 0.5 + x has its last bit at 2^-24, the spacing of subnormals
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

template <class T>
inline constexpr bool is_16_bit = std::is_same_v<T, BF16> || std::is_same_v<T, F16>;

/// Every pair of the four formats, with a single rounding.
template <class To, class From>
SHARDOW_HD To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (is_16_bit<From>) {
    return convert<To>(to_float(x));
  } else if constexpr (std::is_same_v<To, double>) {
    return widen(x);
  } else if constexpr (std::is_same_v<To, float>) {
    return narrow(x);
  } else if constexpr (std::is_same_v<From, double>) {
    return convert<To>(narrow_to_odd(x));
  } else if constexpr (std::is_same_v<To, BF16>) {
    return to_bf16(x);
  } else {
    return to_f16(x);
  }
}

}  // namespace shardow::kernels
