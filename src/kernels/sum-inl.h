// The vector bodies of add_terms() and round_sums(). Ranges are walked in whole vectors and one partial one.
#include "kernels/arithmetic.h"
#include "kernels/sums.h"
#include "kernels/vectors-inl.h"

#if defined(SHARDOW_KERNELS_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SHARDOW_KERNELS_SUM_INL_H_
#undef SHARDOW_KERNELS_SUM_INL_H_
#else
#define SHARDOW_KERNELS_SUM_INL_H_
#endif

#if SHARDOW_VECTORS
HWY_BEFORE_NAMESPACE();
namespace shardow::kernels::HWY_NAMESPACE {

/// Calls body(access, i) for the vectors of `count` elements.
template <class D, class Body>
HWY_INLINE void in_vectors(D d, size_t count, Body body) {
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) body(Whole{}, i);
  if (i < count) body(First{count - i}, i);
}

template <class From, size_t kTerms, bool kFirst>
HWY_NOINLINE void add_some(const Term* terms, double* sums, size_t count) {
  const hn::ScalableTag<double> d;
  in_vectors(d, count, [&](auto access, size_t i) {
    const auto term = [&](size_t t) { return load(d, access, static_cast<const From*>(terms[t].data) + i); };
    const auto c = hn::Set(d, terms[0].coefficient);
    auto sum = kFirst ? hn::Mul(c, term(0)) : hn::MulAdd(c, term(0), access.load(d, sums + i));
    for (size_t t = 1; t < kTerms; ++t) sum = hn::MulAdd(hn::Set(d, terms[t].coefficient), term(t), sum);
    access.store(d, sum, sums + i);
  });
}

template <class From, bool kFirst>
void add_all(std::span<const Term> terms, double* sums, size_t count) {
  static_assert(kMostTerms == 4);
  switch (terms.size()) {
    case 1: return add_some<From, 1, kFirst>(terms.data(), sums, count);
    case 2: return add_some<From, 2, kFirst>(terms.data(), sums, count);
    case 3: return add_some<From, 3, kFirst>(terms.data(), sums, count);
    default: return add_some<From, 4, kFirst>(terms.data(), sums, count);
  }
}

/// To 16 bits by way of floats: what they lose is kept in their last bit, as narrow_to_odd() does. Not for what a float
/// has as a subnormal.
template <class To, class A>
HWY_INLINE void store_rounded(A access, hn::Vec<hn::ScalableTag<double>> v, To* to) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> narrow_d;
  if constexpr (is_16_bit<To>) {
    const hn::RebindToUnsigned<decltype(d)> du;
    const auto bits = hn::BitCast(du, v), low = hn::Set(du, 0x1fffffff);
    const auto odd = hn::Or(hn::AndNot(low, bits), hn::Set(du, 0x20000000));
    v = hn::BitCast(d, hn::IfThenElse(hn::Eq(hn::And(bits, low), hn::Zero(du)), bits, odd));
  }
  store(narrow_d, access, hn::DemoteTo(narrow_d, v), to);
}

template <class To>
HWY_NOINLINE double round_all(const double* sums, To* to, size_t count) {
  const hn::ScalableTag<double> d;
  const auto infinity = hn::Set(d, double_of(uint64_t{0x7ff0000000000000}));
  auto largest = hn::Zero(d);
  const auto nan = hn::Set(d, double_of(uint64_t{0x7ff8000000000000}));
  in_vectors(d, count, [&](auto access, size_t i) {
    auto v = access.load(d, sums + i);
    v = hn::IfThenElse(hn::Eq(v, v), v, nan);
    const auto size = hn::Abs(v);
    largest = hn::Max(largest, hn::IfThenElseZero(hn::Lt(size, infinity), size));
    if constexpr (std::is_same_v<To, double>) {
      access.store(d, v, to + i);
    } else {
      const bool small =
          is_16_bit<To> && !hn::AllFalse(d, hn::And(hn::Gt(size, hn::Zero(d)), hn::Lt(size, hn::Set(d, 0x1p-126))));
      if (!small) return store_rounded(access, v, to + i);
      const size_t n = HWY_MIN(count - i, hn::Lanes(d));
      for (size_t j = i; j < i + n; ++j) to[j] = convert<To>(canonical(sums[j]));
    }
  });
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

}  // namespace shardow::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // SHARDOW_VECTORS

#endif  // per-target include guard
