// Compiled once per instruction set: element i of a block goes into sum i mod 8, however wide the vectors are, by fused multiply-adds, so
// that the results are the same on every processor. add_any() says it element by element; where there are no vectors of what is stored, or
// a number is not finite, it does the work.
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
#include "kernels/vectors-inl.h"

#ifndef SHARDOW_CLI_DEVIATION_ONCE_
#define SHARDOW_CLI_DEVIATION_ONCE_
namespace shardow::cli {

constexpr int64_t kSums = 8;

struct Sums {
  int64_t differing = 0, not_finite = 0;
  double most[kSums] = {}, squares[kSums] = {}, squares_a[kSums] = {};
};

}  // namespace shardow::cli
#endif

HWY_BEFORE_NAMESPACE();
namespace shardow::cli::HWY_NAMESPACE {

#if SHARDOW_VECTORS

namespace hn = hwy::HWY_NAMESPACE;

/// Of finite numbers; `count` is a multiple of kSums. With others among them some sum is not finite.
template <class T>
HWY_INLINE void add_finite(Sums& sums, const T* a, const T* b, int64_t count) {
  const hn::CappedTag<double, kSums> d;
  const kernels::HWY_NAMESPACE::Whole whole;
  for (int64_t lane = 0; lane < kSums; lane += static_cast<int64_t>(hn::Lanes(d))) {
    auto most = hn::LoadU(d, sums.most + lane), squares = hn::LoadU(d, sums.squares + lane),
         squares_a = hn::LoadU(d, sums.squares_a + lane);
    for (int64_t i = lane; i < count; i += kSums) {
      const auto x = kernels::HWY_NAMESPACE::load(d, whole, a + i), y = kernels::HWY_NAMESPACE::load(d, whole, b + i);
      const auto apart = hn::Abs(hn::Sub(x, y));
      sums.differing += static_cast<int64_t>(hn::CountTrue(d, hn::Ne(x, y)));
      most = hn::Max(most, apart);
      squares = hn::MulAdd(apart, apart, squares);
      squares_a = hn::MulAdd(x, x, squares_a);
    }
    hn::StoreU(most, d, sums.most + lane);
    hn::StoreU(squares, d, sums.squares + lane);
    hn::StoreU(squares_a, d, sums.squares_a + lane);
  }
}

/// The same where a and b are equal.
template <class T>
HWY_INLINE void add_equal(Sums& sums, const T* a, int64_t count) {
  const hn::CappedTag<double, kSums> d;
  for (int64_t lane = 0; lane < kSums; lane += static_cast<int64_t>(hn::Lanes(d))) {
    auto squares = hn::LoadU(d, sums.squares_a + lane);
    for (int64_t i = lane; i < count; i += kSums) {
      const auto x = kernels::HWY_NAMESPACE::load(d, kernels::HWY_NAMESPACE::Whole(), a + i);
      squares = hn::MulAdd(x, x, squares);
    }
    hn::StoreU(squares, d, sums.squares_a + lane);
  }
}

#endif

/// Of numbers as they are stored; false where there are no vectors of these.
bool add_stored(Sums& sums, const std::byte* a, const std::byte* b, DType dtype, int64_t count) {
#if SHARDOW_VECTORS
  const auto add = [&]<class T>(const T* /*as*/) {
    const T *const x = reinterpret_cast<const T*>(a), *const y = reinterpret_cast<const T*>(b);
    a == b ? add_equal(sums, x, count) : add_finite(sums, x, y, count);
    return true;
  };
  switch (dtype) {
    case DType::kF64: return add(static_cast<const double*>(nullptr));
    case DType::kF32: return add(static_cast<const float*>(nullptr));
    case DType::kBF16: return add(static_cast<const kernels::BF16*>(nullptr));
    case DType::kF16: return add(static_cast<const kernels::F16*>(nullptr));
    default: return false;
  }
#else
  (void)sums, (void)a, (void)b, (void)dtype, (void)count;
  return false;
#endif
}

}  // namespace shardow::cli::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace shardow::cli {
namespace {

HWY_EXPORT(add_stored);

/// Of any numbers, one by one.
void add_any(Sums& sums, const double* a, const double* b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t lane = i % kSums;
    const double apart = std::fabs(a[i] - b[i]);
    if (std::isfinite(a[i])) sums.squares_a[lane] = std::fma(a[i], a[i], sums.squares_a[lane]);
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    ++sums.differing;
    if (std::isfinite(apart)) {
      sums.most[lane] = std::max(sums.most[lane], apart);
      sums.squares[lane] = std::fma(apart, apart, sums.squares[lane]);
    } else {
      ++sums.not_finite;
    }
  }
}

Deviation total(const Sums& sums) {
  Deviation all;
  all.differing = sums.differing;
  all.not_finite = sums.not_finite;
  for (int64_t lane = 0; lane < kSums; ++lane) {
    all.most = std::max(all.most, sums.most[lane]);
    all.squares += sums.squares[lane];
    all.squares_a += sums.squares_a[lane];
  }
  return all;
}

/// A stretch of two tensors, and room for kScratch / 2 numbers of each as doubles.
struct Block {
  const std::byte *a, *b;
  DType dtype_a, dtype_b;
  double *x, *y;
  bool equal;  ///< byte for byte

  /// Elements from `begin` on, one by one.
  void add_from(Sums& sums, int64_t begin, int64_t end) const {
    if (begin == end) return;
    to_doubles(a + begin * (dtype_bits(dtype_a) / 8), dtype_a, x, end - begin);
    if (!equal) to_doubles(b + begin * (dtype_bits(dtype_b) / 8), dtype_b, y, end - begin);
    add_any(sums, x, equal ? x : y, (end - begin) * (dtype_a == DType::kC64 ? 2 : 1));
  }

  Deviation compare(int64_t count) const {
    Sums sums;
    const int64_t whole = count / kSums * kSums;
    const bool done = dtype_a == dtype_b && HWY_DYNAMIC_DISPATCH(add_stored)(sums, a, equal ? a : b, dtype_a, whole);
    add_from(sums, done ? whole : 0, count);
    const Deviation found = total(sums);
    if (!done || (std::isfinite(found.squares) && std::isfinite(found.squares_a))) return found;
    sums = {};
    add_from(sums, 0, count);
    return total(sums);
  }
};

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
  const int64_t numbers = dtype_a == DType::kC64 ? 2 : 1, most = kScratch / 2 / numbers;  // elements of a block
  const int64_t width_a = dtype_bits(dtype_a) / 8, width_b = dtype_bits(dtype_b) / 8;
  Deviation all;
  for (int64_t at = 0; at < count; at += most) {
    const int64_t here = std::min(most, count - at);
    Block block{a + at * width_a, b + at * width_b, dtype_a, dtype_b, scratch.data(), scratch.data() + kScratch / 2, false};
    block.equal = dtype_a == dtype_b && std::memcmp(block.a, block.b, static_cast<size_t>(here * width_a)) == 0;
    Deviation next = block.compare(here);
    next.equal_bytes = block.equal;
    next.elements = here * numbers;
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
