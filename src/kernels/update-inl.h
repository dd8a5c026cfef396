// The vector body of update(): one template for every pair of storage types.
//
// A row is walked in blocks of four vectors. A block converts its parameters once, tests them once, and then runs over
// the averages: load, one switch on the operation, store; so nothing is multiplied by the number of averages or by the
// operations, and every operand is in a register when it is needed. K passes over blocks kept in L1 were measured
// slower than this; prefetch (within a row) and non-temporal stores gain nothing in place. The first step is a partial
// one that brings the first average (a store stream) to a vector's boundary, the last one is partial too.
#include "kernels/row.h"
#include "kernels/vectors-inl.h"

#if defined(SHARDOW_KERNELS_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SHARDOW_KERNELS_UPDATE_INL_H_
#undef SHARDOW_KERNELS_UPDATE_INL_H_
#else
#define SHARDOW_KERNELS_UPDATE_INL_H_
#endif

#if SHARDOW_VECTORS
HWY_BEFORE_NAMESPACE();
namespace shardow::kernels::HWY_NAMESPACE {

/// False if any lane is not finite: 0 x is 0, or NaN.
template <int kVectors, class D>
HWY_INLINE bool all_finite(D d, const hn::Vec<D> (&p)[kVectors]) {
  auto zeros = hn::Zero(d);
  for (int j = 0; j < kVectors; ++j) zeros = hn::MulAdd(p[j], hn::Zero(d), zeros);
  return hn::AllTrue(d, hn::Eq(zeros, zeros));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V canonical_lanes(D d, V v) {
  const hn::RebindToUnsigned<D> du;
  constexpr auto kQuietNan =
      static_cast<hn::TFromD<decltype(du)>>(sizeof(hn::TFromD<D>) == 8 ? 0x7ff8000000000000u : 0x7fc00000u);
  return hn::IfThenElse(hn::Eq(v, v), v, hn::BitCast(d, hn::Set(du, kQuietNan)));
}

/// noise_bits() for the lanes from index `low` on.
template <class DU>
HWY_INLINE hn::Vec<DU> noise_lanes(DU du, NoiseKey key, uint32_t low) {
  auto x = hn::Add(hn::Mul(hn::Iota(du, 0), hn::Set(du, kWeyl)), hn::Set(du, low * kWeyl + key.start));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(du, kMix1));
  x = hn::Mul(hn::Xor(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(du, key.mix)), hn::Set(du, kMix2));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

/// odd_draw() as a float.
template <class D, class VU>
HWY_INLINE hn::Vec<D> odd_lanes(D d, VU noise) {
  const hn::RebindToSigned<D> di;
  return hn::ConvertTo(d, hn::Or(hn::ShiftRight<15>(hn::BitCast(di, noise)), hn::Set(di, 1)));
}

template <class D, class V, class VU>
HWY_INLINE V stochastic_lerp_lanes(D d, V weight, V p, V e, VU noise) {
  const auto difference = hn::Sub(p, e);
  const auto binade = hn::And(e, hn::BitCast(d, hn::Set(hn::RebindToUnsigned<D>(), 0x7f800000u)));
  const auto shift = hn::Mul(binade, hn::Mul(odd_lanes(d, noise), hn::Set(d, 0x1p-40f)));
  const auto at_rest = hn::Eq(difference, hn::Zero(d));
  return hn::Add(e, hn::MulAdd(weight, difference, hn::IfThenZeroElse(at_rest, shift)));
}

template <class S, class D>
HWY_INLINE BitsOf<D> binade_lanes(D d, hn::Vec<D> x) {
  const hn::RebindToUnsigned<D> du;
  return hn::Max(hn::And(hn::BitCast(du, x), hn::Set(du, 0x7f800000u)), hn::Set(du, Grid<S>::kLeastBinade));
}

/// round_stochastically_bf16(): the value of each lane.
template <class D, class VU>
HWY_INLINE hn::Vec<D> rounded_lanes(BF16 /*format*/, D d, hn::Vec<D> x, VU draw) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x), magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const auto up = hn::Min(hn::Add(magnitude, draw), hn::Set(du, 0x7f7fffffu));
  const auto rounded = hn::IfThenElse(hn::Eq(magnitude, hn::Set(du, 0x7f800000u)), magnitude, up);
  const auto signed_bits = hn::And(hn::Or(rounded, hn::And(bits, hn::Set(du, 0x80000000u))), hn::Set(du, 0xffff0000u));
  return canonical_lanes(d, hn::IfThenElse(hn::Eq(x, x), hn::BitCast(d, signed_bits), x));
}

/// round_stochastically_f16(): the value of each lane.
template <class D, class VU>
HWY_INLINE hn::Vec<D> rounded_lanes(F16 /*format*/, D d, hn::Vec<D> x, VU draw) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto magnitude = hn::Min(hn::Abs(x), hn::Set(d, 65504.0f));
  const auto binade = binade_lanes<F16>(d, magnitude);
  const auto inverse = hn::BitCast(d, hn::Sub(hn::Set(du, Grid<F16>::kInverse), binade));
  const auto units = hn::BitCast(du, hn::ConvertTo(di, hn::Mul(hn::Mul(magnitude, inverse), hn::Set(d, 65536.0f))));
  const auto whole = hn::ConvertTo(d, hn::BitCast(di, hn::ShiftRight<16>(hn::Add(units, draw))));
  const auto rounded = hn::Mul(whole, hn::Mul(hn::BitCast(d, binade), hn::Set(d, Grid<F16>::kUlpOfOne)));
  const auto finite = hn::Lt(hn::Abs(x), hn::Inf(d));
  return canonical_lanes(d, hn::IfThenElse(finite, hn::CopySign(rounded, x), x));
}

template <class S, class D, class V, class VU>
HWY_INLINE V integer_step_lanes(D d, V weight, V p, V e, VU noise) {
  const auto binade = binade_lanes<S>(d, e);
  const auto ulp = hn::Mul(hn::BitCast(d, binade), hn::Set(d, Grid<S>::kUlpOfOne));
  const auto inverse = hn::BitCast(d, hn::Sub(hn::Set(hn::RebindToUnsigned<D>(), Grid<S>::kInverse), binade));
  const auto difference = hn::Sub(p, e);
  const auto q = hn::Mul(weight, hn::Mul(difference, inverse));
  const auto draw = hn::Mul(odd_lanes(d, noise), hn::Set(d, 0x1p-17f));
  const auto step = hn::Add(e, hn::Mul(hn::Round(hn::Add(q, draw)), ulp));
  const auto largest = hn::Set(d, 0x1.fffffep127f);
  const auto clamped_step = hn::Min(hn::Max(step, hn::Neg(largest)), largest);
  return hn::IfThenElse(hn::Lt(hn::Abs(q), hn::Set(d, 1.0f)), clamped_step, hn::MulAdd(weight, difference, e));
}

/// Lanes that are values of S: nothing is left to round. (DemoteTo does what is left for float16.)
template <class S, class D, class A>
HWY_INLINE void store_value(D d, A access, hn::Vec<D> v, S* to) {
  if constexpr (std::is_same_v<S, BF16>) {
    store_16_bits(d, access, hn::ShiftRight<16>(hn::BitCast(hn::RebindToUnsigned<D>(), v)),
                  reinterpret_cast<uint16_t*>(to));
  } else {
    store(d, access, v, to);
  }
}

/// next_as() for one block: e becomes the new averages. `low` is the global index of the first lane.
template <int kVectors, class S, class D>
HWY_INLINE void next_block(D d, const Formula<hn::TFromD<D>>& formula, NoiseKey key, uint32_t low,
                           const hn::Vec<D> (&p)[kVectors], hn::Vec<D> (&e)[kVectors]) {
  const hn::Rebind<uint32_t, D> du;
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  const auto weight = hn::Set(d, formula.weight), decay = hn::Set(d, formula.decay);
  if constexpr (is_16_bit<S>) {
    for (int j = 0; j < kVectors; ++j) {
      const auto noise = noise_lanes(du, key, low + static_cast<uint32_t>(j) * lanes);
      const auto sum = integer_step_lanes<S>(d, weight, p[j], e[j], noise);
      e[j] = rounded_lanes(S{}, d, sum, hn::And(noise, hn::Set(du, 0xffffu)));
    }
    return;
  }
  switch (formula.op) {
    case Op::kLerpFromParameter:
      for (int j = 0; j < kVectors; ++j) e[j] = hn::MulAdd(weight, hn::Sub(p[j], e[j]), p[j]);
      break;
    case Op::kMulAdd:
      for (int j = 0; j < kVectors; ++j) e[j] = hn::MulAdd(p[j], weight, hn::Mul(e[j], decay));
      break;
    case Op::kTwoProducts:
      for (int j = 0; j < kVectors; ++j) e[j] = hn::Add(hn::Mul(e[j], decay), hn::Mul(p[j], weight));
      break;
    case Op::kDifference:
      for (int j = 0; j < kVectors; ++j) e[j] = hn::Sub(e[j], hn::Mul(weight, hn::Sub(e[j], p[j])));
      break;
    case Op::kQuotient:
      for (int j = 0; j < kVectors; ++j) e[j] = hn::Add(e[j], hn::Div(hn::Sub(p[j], e[j]), weight));
      break;
    case Op::kStochastic:
      if constexpr (std::is_same_v<S, float>) {
        for (int j = 0; j < kVectors; ++j) {
          e[j] = stochastic_lerp_lanes(d, weight, p[j], e[j],
                                       noise_lanes(du, key, low + static_cast<uint32_t>(j) * lanes));
        }
      }
      break;
    default:
      for (int j = 0; j < kVectors; ++j) e[j] = hn::MulAdd(weight, hn::Sub(p[j], e[j]), e[j]);
      break;
  }
  for (int j = 0; j < kVectors; ++j) e[j] = canonical_lanes(d, e[j]);
}

template <int kVectors, class S, class D>
HWY_INLINE void copy_block(D d, const hn::Vec<D> (&p)[kVectors], hn::Vec<D> (&e)[kVectors]) {
  for (int j = 0; j < kVectors; ++j) {
    if constexpr (std::is_same_v<S, BF16>) {
      e[j] = hn::BitCast(d, bf16_bits(d, p[j]));
    } else {
      e[j] = p[j];
    }
  }
}

/// `count` elements from `begin`: kVectors vectors, or a part of one. Returns how many parameters were not finite.
template <int kVectors, class P, class S, class A>
HWY_INLINE int64_t update_block(const Row<P, S>& row, A access, int64_t begin, int64_t count) {
  const hn::ScalableTag<Computing<S>> d;
  const size_t lanes = hn::Lanes(d);
  hn::Vec<decltype(d)> p[kVectors], e[kVectors], old[kVectors];
  for (int j = 0; j < kVectors; ++j) p[j] = load(d, access, row.parameter + begin + static_cast<size_t>(j) * lanes);
  if (HWY_UNLIKELY(!all_finite<kVectors>(d, p))) return update_elements(row, begin, begin + count);
  for (int j = 0; j < kVectors; ++j) old[j] = load(d, access, row.averages[0] + begin + static_cast<size_t>(j) * lanes);
  for (int k = 0; k < row.num_averages; ++k) {
    for (int j = 0; j < kVectors; ++j) e[j] = old[j];
    if (row.formulas[k].op == Op::kCopy) {
      copy_block<kVectors, S>(d, p, e);
    } else {
      next_block<kVectors, S>(d, row.formulas[k], row.keys[k], row.low + static_cast<uint32_t>(begin), p, e);
    }
    // The next average is loaded before this one is stored: arenas often lie a multiple of 4 KiB apart, where a load
    // waits for an earlier store.
    if (k + 1 < row.num_averages) {
      for (int j = 0; j < kVectors; ++j)
        old[j] = load(d, access, row.averages[k + 1] + begin + static_cast<size_t>(j) * lanes);
    }
    for (int j = 0; j < kVectors; ++j)
      store_value(d, access, e[j], row.averages[k] + begin + static_cast<size_t>(j) * lanes);
  }
  return 0;
}

/// Elements before the first average's next vector boundary.
template <class S>
HWY_INLINE int64_t elements_to_boundary(const S* average, size_t lanes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(average);
  return static_cast<int64_t>((~address + 1) % (lanes * sizeof(S)) / sizeof(S));
}

template <class P, class S>
HWY_NOINLINE int64_t update_row(const Row<P, S>& row) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<Computing<S>>()));
  constexpr int kUnroll = 4;
  int64_t non_finite = 0, i = HWY_MIN(elements_to_boundary(row.averages[0], static_cast<size_t>(lanes)), row.count);
  if (i > 0) non_finite += update_block<1>(row, First{static_cast<size_t>(i)}, 0, i);
  for (; i + kUnroll * lanes <= row.count; i += kUnroll * lanes)
    non_finite += update_block<kUnroll>(row, Whole{}, i, kUnroll * lanes);
  for (; i + lanes <= row.count; i += lanes) non_finite += update_block<1>(row, Whole{}, i, lanes);
  if (i < row.count) non_finite += update_block<1>(row, First{static_cast<size_t>(row.count - i)}, i, row.count - i);
  return non_finite;
}

}  // namespace shardow::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // SHARDOW_VECTORS

#endif  // per-target include guard
