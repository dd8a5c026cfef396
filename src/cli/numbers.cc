#include "cli/numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/kernels.h"
#include "tensor/dtype.h"

namespace shardow::cli {
namespace {

template <class T>
void convert(const std::byte* from, double* to, int64_t count) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    to[i] = static_cast<double>(value);
  }
}

/// A float of 8 bits: `mantissa` bits at its end, exponents with this bias; `finite` and `fnuz` are the ways in which
/// it has no infinity.
double small_float(unsigned bits, int mantissa, int bias, bool ieee, bool fnuz) {
  const unsigned magnitude = bits & 0x7f, exponent = magnitude >> mantissa,
                 fraction = magnitude & ((1u << mantissa) - 1);
  const unsigned top = 0x7fu >> mantissa;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  if (fnuz && bits == 0x80) return kNan;
  if (ieee && exponent == top)
    return fraction != 0 ? kNan : (bits & 0x80 ? -1 : 1) * std::numeric_limits<double>::infinity();
  if (!ieee && !fnuz && magnitude == 0x7f) return kNan;
  const double value = exponent == 0
                           ? std::ldexp(fraction, 1 - bias - mantissa)
                           : std::ldexp((1u << mantissa) + fraction, static_cast<int>(exponent) - bias - mantissa);
  return (bits & 0x80) != 0 ? -value : value;
}

using Table = std::array<double, 256>;

template <class Fn>
Table table_of(Fn value) {
  Table table{};
  for (unsigned i = 0; i < 256; ++i) table[i] = value(i);
  return table;
}

const Table& table_for(DType dtype) {
  static const Table e5m2 = table_of([](unsigned i) { return small_float(i, 2, 15, true, false); });
  static const Table e4m3 = table_of([](unsigned i) { return small_float(i, 3, 7, false, false); });
  static const Table e5m2fnuz = table_of([](unsigned i) { return small_float(i, 2, 16, false, true); });
  static const Table e4m3fnuz = table_of([](unsigned i) { return small_float(i, 3, 8, false, true); });
  static const Table e8m0 =
      table_of([](unsigned i) { return i == 255 ? std::nan("") : std::ldexp(1.0, static_cast<int>(i) - 127); });
  switch (dtype) {
    case DType::kF8E5M2: return e5m2;
    case DType::kF8E4M3: return e4m3;
    case DType::kF8E5M2Fnuz: return e5m2fnuz;
    case DType::kF8E4M3Fnuz: return e4m3fnuz;
    default: return e8m0;
  }
}

/// What the nearest float64 leaves of a whole number.
template <class T>
void convert_rest(const std::byte* from, double* to, int64_t count) noexcept {
  __extension__ using Wide = __int128;  // the nearest to 2^64 - 1 is 2^64
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    to[i] = static_cast<double>(static_cast<Wide>(value) - static_cast<Wide>(static_cast<double>(value)));
  }
}

}  // namespace

bool has_values(DType dtype) noexcept {
  return dtype_bits(dtype) >= 8;
}

void to_doubles(const std::byte* from, DType dtype, double* to, int64_t count) noexcept {
  switch (dtype) {
    case DType::kF32:
    case DType::kF64:
    case DType::kF16:
    case DType::kBF16: return kernels::cpu::cast(from, dtype, to, DType::kF64, count);
    case DType::kC64: return convert<float>(from, to, 2 * count);
    case DType::kBool:
    case DType::kU8: return convert<uint8_t>(from, to, count);
    case DType::kI8: return convert<int8_t>(from, to, count);
    case DType::kI16: return convert<int16_t>(from, to, count);
    case DType::kU16: return convert<uint16_t>(from, to, count);
    case DType::kI32: return convert<int32_t>(from, to, count);
    case DType::kU32: return convert<uint32_t>(from, to, count);
    case DType::kI64: return convert<int64_t>(from, to, count);
    case DType::kU64: return convert<uint64_t>(from, to, count);
    case DType::kF8E5M2:
    case DType::kF8E4M3:
    case DType::kF8E8M0:
    case DType::kF8E4M3Fnuz:
    case DType::kF8E5M2Fnuz: {
      const Table& table = table_for(dtype);
      for (int64_t i = 0; i < count; ++i) to[i] = table[static_cast<uint8_t>(from[i])];
      return;
    }
    case DType::kF4:
    case DType::kF6E2M3:
    case DType::kF6E3M2: return;
  }
}

bool has_rests(DType dtype) noexcept {
  return dtype == DType::kI64 || dtype == DType::kU64;
}

void to_rests(const std::byte* from, DType dtype, double* to, int64_t count) noexcept {
  if (dtype == DType::kI64) return convert_rest<int64_t>(from, to, count);
  if (dtype == DType::kU64) return convert_rest<uint64_t>(from, to, count);
  std::fill_n(to, count, 0.0);
}

}  // namespace shardow::cli
