// Compiled once per instruction set: element i of a block goes into sum i mod 8, however wide the vectors are, and without fused
// multiply-adds, so that the results are the same on every processor.
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

#ifndef SHARDOW_CLI_DEVIATION_ONCE_
#define SHARDOW_CLI_DEVIATION_ONCE_
namespace shardow::cli {

constexpr int64_t kSums = 8;

struct Sums {
  double differing[kSums] = {}, not_finite[kSums] = {}, most[kSums] = {}, squares[kSums] = {}, squares_a[kSums] = {};
};

}  // namespace shardow::cli
#endif

HWY_BEFORE_NAMESPACE();
namespace shardow::cli::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Of finite numbers; `count` is a multiple of kSums. With others among them some sum is not finite.
void add_finite(Sums& sums, const double* a, const double* b, int64_t count) {
  const hn::CappedTag<double, kSums> d;
  const auto one = hn::Set(d, 1.0);
  for (int64_t lane = 0; lane < kSums; lane += static_cast<int64_t>(hn::Lanes(d))) {
    auto differing = hn::Zero(d), most = hn::Zero(d), squares = hn::Zero(d), squares_a = hn::Zero(d);
    for (int64_t i = lane; i < count; i += kSums) {
      const auto x = hn::LoadU(d, a + i), y = hn::LoadU(d, b + i);
      const auto apart = hn::Abs(hn::Sub(x, y));
      differing = hn::Add(differing, hn::IfThenElseZero(hn::Ne(x, y), one));
      most = hn::Max(most, apart);
      squares = hn::Add(squares, hn::Mul(apart, apart));
      squares_a = hn::Add(squares_a, hn::Mul(x, x));
    }
    hn::StoreU(differing, d, sums.differing + lane);
    hn::StoreU(most, d, sums.most + lane);
    hn::StoreU(squares, d, sums.squares + lane);
    hn::StoreU(squares_a, d, sums.squares_a + lane);
  }
}

/// The same where a and b are equal.
void add_equal(Sums& sums, const double* a, int64_t count) {
  const hn::CappedTag<double, kSums> d;
  for (int64_t lane = 0; lane < kSums; lane += static_cast<int64_t>(hn::Lanes(d))) {
    auto squares = hn::Zero(d);
    for (int64_t i = lane; i < count; i += kSums) {
      const auto x = hn::LoadU(d, a + i);
      squares = hn::Add(squares, hn::Mul(x, x));
    }
    hn::StoreU(squares, d, sums.squares_a + lane);
  }
}

}  // namespace shardow::cli::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace shardow::cli {
namespace {

HWY_EXPORT(add_finite);
HWY_EXPORT(add_equal);

/// Of any numbers, one by one: for blocks with NaN or infinity among them.
void add_any(Sums& sums, const double* a, const double* b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t lane = i % kSums;
    const double apart = std::fabs(a[i] - b[i]);
    if (std::isfinite(a[i])) sums.squares_a[lane] += a[i] * a[i];
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    sums.differing[lane] += 1;
    if (std::isfinite(apart)) {
      sums.most[lane] = std::max(sums.most[lane], apart);
      sums.squares[lane] += apart * apart;
    } else {
      sums.not_finite[lane] += 1;
    }
  }
}

Deviation total(const Sums& sums) {
  Deviation all;
  for (int64_t lane = 0; lane < kSums; ++lane) {
    all.differing += static_cast<int64_t>(sums.differing[lane]);
    all.not_finite += static_cast<int64_t>(sums.not_finite[lane]);
    all.most = std::max(all.most, sums.most[lane]);
    all.squares += sums.squares[lane];
    all.squares_a += sums.squares_a[lane];
  }
  return all;
}

/// Of `count` numbers, with room for zeros behind them, which change nothing.
Deviation block(double* a, double* b, int64_t count, bool equal) {
  const int64_t whole = (count + kSums - 1) / kSums * kSums;
  std::fill(a + count, a + whole, 0.0);
  Sums sums;
  if (equal) {
    HWY_DYNAMIC_DISPATCH(add_equal)(sums, a, whole);
  } else {
    std::fill(b + count, b + whole, 0.0);
    HWY_DYNAMIC_DISPATCH(add_finite)(sums, a, b, whole);
  }
  Deviation found = total(sums);
  if (std::isfinite(found.squares) && std::isfinite(found.squares_a)) return found;
  sums = {};
  add_any(sums, a, equal ? a : b, count);
  return total(sums);
}

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
  constexpr int64_t kBlock = kScratch / 2;
  double *const x = scratch.data(), *const y = scratch.data() + kBlock;
  const int64_t numbers = dtype_a == DType::kC64 ? 2 : 1;  // in an element
  const int64_t width_a = dtype_bits(dtype_a) / 8, width_b = dtype_bits(dtype_b) / 8;
  Deviation all;
  for (int64_t at = 0; at < count; at += kBlock / numbers) {
    const int64_t most = std::min(kBlock / numbers, count - at);
    const std::byte *const from_a = a + at * width_a, *const from_b = b + at * width_b;
    const bool equal = dtype_a == dtype_b && std::memcmp(from_a, from_b, static_cast<size_t>(most * width_a)) == 0;
    to_doubles(from_a, dtype_a, x, most);
    if (!equal) to_doubles(from_b, dtype_b, y, most);
    Deviation next = block(x, y, most * numbers, equal);
    next.equal_bytes = equal;
    next.elements = most * numbers;
    all += next;
  }
  return all;
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
