// Compiled once per instruction set. The loops are plain C++ over eight sums, which the compiler makes vectors of, however wide: element i
// goes into sum i mod 8 on every processor, and without fused multiply-adds, so that the results are the same.
#include "cli/deviation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/kernels.h"
#include "tensor/dtype.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cli/deviation.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace shardow::cli::HWY_NAMESPACE {

constexpr int64_t kSums = 8;

struct Sums {
  double differing[kSums] = {}, finite[kSums] = {}, most[kSums] = {}, squares[kSums] = {}, squares_a[kSums] = {};
};

HWY_INLINE void add_one(Sums& sums, int64_t lane, double a, double b) {
  constexpr double kMost = std::numeric_limits<double>::max();
  const double difference = std::fabs(a - b);
  const bool same = (a == b) | ((a != a) & (b != b));
  const bool counts = !same & (difference <= kMost);
  const double counted = counts ? difference : 0;
  sums.differing[lane] += same ? 0.0 : 1.0;
  sums.finite[lane] += counts ? 1.0 : 0.0;
  sums.most[lane] = counted > sums.most[lane] ? counted : sums.most[lane];
  sums.squares[lane] += counted * counted;
  sums.squares_a[lane] += std::fabs(a) <= kMost ? a * a : 0;
}

void add_all(Sums& out, const double* a, const double* b, int64_t count) {
  Sums sums = out;  // in registers
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int64_t lane = 0; lane < kSums; ++lane) add_one(sums, lane, a[i + lane], b[i + lane]);
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) add_one(sums, lane, a[i], b[i]);
  out = sums;
}

/// Where the bytes are equal.
void add_equal(Sums& out, const double* a, int64_t count) {
  constexpr double kMost = std::numeric_limits<double>::max();
  double sums[kSums];
  std::copy(out.squares_a, out.squares_a + kSums, sums);
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int64_t lane = 0; lane < kSums; ++lane) sums[lane] += std::fabs(a[i + lane]) <= kMost ? a[i + lane] * a[i + lane] : 0;
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) sums[lane] += std::fabs(a[i]) <= kMost ? a[i] * a[i] : 0;
  std::copy(sums, sums + kSums, out.squares_a);
}

Deviation total(const Sums& sums) {
  Deviation all;
  for (int64_t lane = 0; lane < kSums; ++lane) {
    all.differing += static_cast<int64_t>(sums.differing[lane]);
    all.not_finite += static_cast<int64_t>(sums.differing[lane]) - static_cast<int64_t>(sums.finite[lane]);
    all.most = std::max(all.most, sums.most[lane]);
    all.squares += sums.squares[lane];
    all.squares_a += sums.squares_a[lane];
  }
  return all;
}

Deviation compute(const std::byte* a, DType dtype_a, const std::byte* b, DType dtype_b, int64_t count, double* scratch) {
  constexpr int64_t kBlock = kScratch / 2;
  Sums sums;
  bool all_equal = true;
  const int64_t width_a = dtype_bits(dtype_a) / 8, width_b = dtype_bits(dtype_b) / 8;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t most = std::min(kBlock, count - at);
    const std::byte *from_a = a + at * width_a, *from_b = b + at * width_b;
    const bool equal = dtype_a == dtype_b && std::memcmp(from_a, from_b, static_cast<size_t>(most * width_a)) == 0;
    all_equal &= equal;
    const int64_t parts = dtype_a == DType::kC64 ? 2 : 1;
    for (int64_t part = 0; part < parts; ++part) {  // of a complex number, so that a block has kBlock numbers
      const int64_t begin = most * part / parts, end = most * (part + 1) / parts;
      const int64_t numbers = (end - begin) * parts;
      to_doubles(from_a + begin * width_a, dtype_a, scratch, end - begin);
      if (equal) {
        add_equal(sums, scratch, numbers);
      } else {
        to_doubles(from_b + begin * width_b, dtype_b, scratch + kBlock, end - begin);
        add_all(sums, scratch, scratch + kBlock, numbers);
      }
    }
  }
  Deviation all = total(sums);
  all.equal_bytes = all_equal;
  all.elements = dtype_a == DType::kC64 ? 2 * count : count;
  return all;
}

}  // namespace shardow::cli::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace shardow::cli {
namespace {

HWY_EXPORT(compute);

template <class T>
void convert(const std::byte* from, double* to, int64_t count) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    to[i] = static_cast<double>(value);
  }
}

/// A float of 8 bits: `mantissa` bits at its end, exponents with this bias; `finite` and `fnuz` are the ways in which it has no infinity.
double small_float(unsigned bits, int mantissa, int bias, bool ieee, bool fnuz) {
  const unsigned magnitude = bits & 0x7f, exponent = magnitude >> mantissa, fraction = magnitude & ((1u << mantissa) - 1);
  const unsigned top = 0x7fu >> mantissa;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  if (fnuz && bits == 0x80) return kNan;
  if (ieee && exponent == top) return fraction != 0 ? kNan : (bits & 0x80 ? -1 : 1) * std::numeric_limits<double>::infinity();
  if (!ieee && !fnuz && magnitude == 0x7f) return kNan;
  const double value = exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
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
  static const Table e8m0 = table_of([](unsigned i) { return i == 255 ? std::nan("") : std::ldexp(1.0, static_cast<int>(i) - 127); });
  switch (dtype) {
    case DType::kF8E5M2: return e5m2;
    case DType::kF8E4M3: return e4m3;
    case DType::kF8E5M2Fnuz: return e5m2fnuz;
    case DType::kF8E4M3Fnuz: return e4m3fnuz;
    default: return e8m0;
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

Deviation deviation(const std::byte* a, DType dtype_a, const std::byte* b, DType dtype_b, int64_t count,
                    std::span<double> scratch) noexcept {
  return HWY_DYNAMIC_DISPATCH(compute)(a, dtype_a, b, dtype_b, count, scratch.data());
}

double Deviation::rms() const noexcept {
  const int64_t counted = elements - not_finite;
  return counted == 0 ? 0 : std::sqrt(squares / static_cast<double>(counted));
}

double Deviation::relative() const noexcept {
  if (squares == 0) return 0;
  return squares_a == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(squares / squares_a);
}

Deviation& Deviation::operator+=(const Deviation& next) noexcept {
  equal_bytes &= next.equal_bytes;
  elements += next.elements;
  differing += next.differing;
  not_finite += next.not_finite;
  most = std::max(most, next.most);
  squares += next.squares;
  squares_a += next.squares_a;
  return *this;
}

}  // namespace shardow::cli
#endif  // HWY_ONCE
