// Compiled once per instruction set: element i of a block goes into sum i mod 16, however wide the vectors are, by
// fused multiply-adds, so that the results are the same on every processor. add_plain() says it element by element, for
// what there are no vectors of. A block whose sums show that something in it is not finite, or that squares were lost,
// is done anew by add_scaled().
#include "cli/deviation.h"

#include <algorithm>
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

constexpr int64_t kSums = 16;

struct Sums {
  int64_t differing = 0;
  double most[kSums] = {}, squares[kSums] = {}, squares_a[kSums] = {};
};

}  // namespace shardow::cli
#endif

HWY_BEFORE_NAMESPACE();
namespace shardow::cli::HWY_NAMESPACE {

#if SHARDOW_VECTORS

namespace hn = hwy::HWY_NAMESPACE;
using kernels::BF16;

/// Two vectors' worth of elements that are neighbours; of bfloat16 the even ones and the odd ones, which costs less
/// than in order.
template <class D>
struct Two {
  hn::Vec<D> first, second;
};

template <class D, class T>
HWY_INLINE Two<D> load_two(D d, const T* from) {
  const kernels::HWY_NAMESPACE::Whole whole;
  return {kernels::HWY_NAMESPACE::load(d, whole, from), kernels::HWY_NAMESPACE::load(d, whole, from + hn::Lanes(d))};
}

template <class D>
HWY_INLINE Two<D> load_two(D d, const BF16* from) {
  const hn::Rebind<float, D> floats;
  const hn::Rebind<uint32_t, D> bits;
  const auto both = hn::LoadU(bits, reinterpret_cast<const uint32_t*>(from));
  return {hn::PromoteTo(d, hn::BitCast(floats, hn::ShiftLeft<16>(both))),
          hn::PromoteTo(d, hn::BitCast(floats, hn::And(both, hn::Set(bits, 0xffff0000u))))};
}

template <class T, class D>
HWY_INLINE void store_two(D d, const Two<D>& sums, double* to) {
  if constexpr (std::is_same_v<T, BF16>) {
    hn::StoreInterleaved2(sums.first, sums.second, d, to);
  } else {
    hn::StoreU(sums.first, d, to);
    hn::StoreU(sums.second, d, to + hn::Lanes(d));
  }
}

using Doubles = hn::CappedTag<double, kSums / 2>;

/// Of finite numbers; `count` is a multiple of kSums. With others among them some sum is not finite.
template <class T>
HWY_INLINE void add_finite(Sums& sums, const T* a, const T* b, int64_t count) {
  const Doubles d;
  for (int64_t lane = 0; lane < kSums; lane += static_cast<int64_t>(2 * hn::Lanes(d))) {
    const auto zero = hn::Zero(d);
    const auto one = hn::Set(d, 1.0);
    Two<Doubles> differing{zero, zero}, most = differing, squares = differing, squares_a = differing;
    const auto add = [&](auto x, auto y, auto& differing_of, auto& most_of, auto& squares_of,
                         auto& squares_a_of) HWY_ATTR {
      const auto apart = hn::Sub(x, y);
      differing_of =
          hn::Add(differing_of, hn::IfThenElseZero(hn::Ne(x, y), one));  // costs less than counting in whole numbers
      most_of = hn::Max(most_of, hn::Abs(apart));
      squares_of = hn::MulAdd(apart, apart, squares_of);
      squares_a_of = hn::MulAdd(x, x, squares_a_of);
    };
    for (int64_t i = lane; i < count; i += kSums) {
      const Two<Doubles> x = load_two(d, a + i), y = load_two(d, b + i);
      add(x.first, y.first, differing.first, most.first, squares.first, squares_a.first);
      add(x.second, y.second, differing.second, most.second, squares.second, squares_a.second);
    }
    sums.differing += static_cast<int64_t>(hn::GetLane(hn::SumOfLanes(d, hn::Add(differing.first, differing.second))));
    store_two<T>(d, most, sums.most + lane);
    store_two<T>(d, squares, sums.squares + lane);
    store_two<T>(d, squares_a, sums.squares_a + lane);
  }
}

/// The same where a and b are equal.
template <class T>
HWY_INLINE void add_equal(Sums& sums, const T* a, int64_t count) {
  const Doubles d;
  for (int64_t lane = 0; lane < kSums; lane += static_cast<int64_t>(2 * hn::Lanes(d))) {
    Two<Doubles> squares{hn::Zero(d), hn::Zero(d)};
    for (int64_t i = lane; i < count; i += kSums) {
      const Two<Doubles> x = load_two(d, a + i);
      squares = {hn::MulAdd(x.first, x.first, squares.first), hn::MulAdd(x.second, x.second, squares.second)};
    }
    store_two<T>(d, squares, sums.squares_a + lane);
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
    case DType::kBF16: return add(static_cast<const BF16*>(nullptr));
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

/// Numbers of a block, and of I64 and U64 what float64 leaves of each; no rests are nullptr.
struct Numbers {
  double *numbers, *rests;

  double less(const Numbers& other, int64_t i) const {
    const double apart = numbers[i] - other.numbers[i];
    return rests == nullptr
               ? apart
               : apart + (rests[i] - other.rests[i]);  // one rounding in all where they are near one another
  }
};

/// Finite numbers from `begin` on, as vectors would.
void add_plain(Sums& sums, const Numbers& a, const Numbers& b, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t lane = i % kSums;
    const double apart = std::fabs(a.less(b, i));
    sums.differing += apart != 0 ? 1 : 0;
    sums.most[lane] = std::max(sums.most[lane], apart);
    sums.squares[lane] = std::fma(apart, apart, sums.squares[lane]);
    sums.squares_a[lane] = std::fma(a.numbers[i], a.numbers[i], sums.squares_a[lane]);
  }
}

Deviation total(const Sums& sums) {
  Deviation all;
  all.differing = sums.differing;
  for (int64_t lane = 0; lane < kSums; ++lane) {
    all.most = std::max(all.most, sums.most[lane]);
    all.squares.middle += sums.squares[lane];
    all.squares_a.middle += sums.squares_a[lane];
  }
  return all;
}

/// Any numbers, whatever their size.
Deviation add_scaled(const Numbers& a, const Numbers& b, int64_t count) {
  Deviation all;
  for (int64_t i = 0; i < count; ++i) {
    const double x = a.numbers[i], y = b.numbers[i], apart = std::fabs(a.less(b, i));
    if (std::isfinite(x)) all.squares_a.add(x);
    if (apart == 0 || (std::isinf(x) && x == y) || (std::isnan(x) && std::isnan(y))) continue;
    ++all.differing;
    if (std::isfinite(apart)) {
      all.most = std::max(all.most, apart);
      all.squares.add(apart);
    } else {
      ++all.not_finite;
    }
  }
  return all;
}

/// Whether sums show that every number was finite, and that no square that counts was too small for float64.
bool is_plain(const Sums& sums, const Deviation& found, bool doubles) {
  const auto fits = [&](double sum, bool none) {
    if (!doubles) return std::isfinite(sum);  // squares of all other dtypes lie between 1e-90 and 1e78
    return none ? sum == 0 : sum >= kSmallest * kSmallest && sum <= kLargest * kLargest;
  };
  const auto all_zero = [](const double(&most)[kSums]) {
    return std::all_of(most, most + kSums, [](double one) { return one == 0; });
  };
  return fits(found.squares.middle, all_zero(sums.most)) && fits(found.squares_a.middle, false);
}

/// A stretch of two tensors, and room for its numbers as doubles.
struct Block {
  const std::byte *a, *b;
  DType dtype_a, dtype_b;
  std::span<double> scratch;
  bool equal;  ///< byte for byte

  bool rests() const { return has_rests(dtype_a) || has_rests(dtype_b); }

  /// Elements from `begin` on, of a and of b; of what is equal twice those of a.
  std::pair<Numbers, Numbers> numbers(int64_t begin, int64_t count) const {
    const size_t quarter = scratch.size() / 4, room = rests() ? quarter : 2 * quarter;
    const auto convert = [&](const std::byte* from, DType dtype, double* to) {
      from += begin * (dtype_bits(dtype) / 8);
      to_doubles(from, dtype, to, count);
      if (rests()) to_rests(from, dtype, to + 2 * quarter, count);
      return Numbers{to, rests() ? to + 2 * quarter : nullptr};
    };
    const Numbers of_a = convert(a, dtype_a, scratch.data());
    return {of_a, equal ? of_a : convert(b, dtype_b, scratch.data() + room)};
  }

  /// Of what there are no vectors of as it is stored, those of its doubles; returns how many it did. `sums` has nothing
  /// yet.
  int64_t add_converted(Sums& sums, const Numbers& x, const Numbers& y, int64_t whole) const {
    const auto bytes = [](const double* of) { return reinterpret_cast<const std::byte*>(of); };
    return !rests() && HWY_DYNAMIC_DISPATCH(add_stored)(sums, bytes(x.numbers), bytes(y.numbers), DType::kF64, whole)
               ? whole
               : 0;
  }

  Deviation compare(int64_t count) const {
    const int64_t width = dtype_a == DType::kC64 ? 2 : 1, whole = count / kSums * kSums;
    Sums sums;
    const bool done = dtype_a == dtype_b && HWY_DYNAMIC_DISPATCH(add_stored)(sums, a, equal ? a : b, dtype_a, whole);
    if (const int64_t begin = done ? whole : 0; begin < count) {
      const auto [x, y] = numbers(begin, count - begin);
      const int64_t all = (count - begin) * width;
      add_plain(sums, x, y, done ? 0 : add_converted(sums, x, y, all / kSums * kSums), all);
    }
    const Deviation found = total(sums);
    if (is_plain(sums, found, dtype_a == DType::kF64 || dtype_b == DType::kF64)) return found;
    const auto [x, y] = numbers(0, count);
    return add_scaled(x, y, count * width);
  }
};

}  // namespace

Deviation deviation(const std::byte* a, DType dtype_a, const std::byte* b, DType dtype_b, int64_t count,
                    std::span<double> scratch) noexcept {
  const int64_t numbers = dtype_a == DType::kC64 ? 2 : 1;
  const int64_t most = kScratch / (has_rests(dtype_a) || has_rests(dtype_b) ? 4 : 2) / numbers;  // elements of a block
  const int64_t width_a = dtype_bits(dtype_a) / 8, width_b = dtype_bits(dtype_b) / 8;
  Deviation all;
  for (int64_t at = 0; at < count; at += most) {
    const int64_t here = std::min(most, count - at);
    Block block{a + at * width_a, b + at * width_b, dtype_a, dtype_b, scratch.first(kScratch), false};
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
  const auto [root, exponent] = squares.root();
  return counted == 0 ? 0 : std::ldexp(root / std::sqrt(static_cast<double>(counted)), exponent);
}

double Deviation::relative() const noexcept {
  if (squares.zero()) return 0;
  if (squares_a.zero()) return std::numeric_limits<double>::infinity();
  const auto [root, exponent] = squares.root();
  const auto [root_a, exponent_a] = squares_a.root();
  return std::ldexp(root / root_a, exponent - exponent_a);
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
