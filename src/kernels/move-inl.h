// The vector bodies of swap() and cast(). Ranges are walked in whole vectors and one partial one.
#include "kernels/exchange.h"
#include "kernels/vectors-inl.h"

#if defined(SHARDOW_KERNELS_MOVE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SHARDOW_KERNELS_MOVE_INL_H_
#undef SHARDOW_KERNELS_MOVE_INL_H_
#else
#define SHARDOW_KERNELS_MOVE_INL_H_
#endif

#if SHARDOW_VECTORS
HWY_BEFORE_NAMESPACE();
namespace shardow::kernels::HWY_NAMESPACE {

template <class A>
HWY_INLINE void swap_equal(A access, uint16_t* a, uint16_t* b) {
  const hn::ScalableTag<uint16_t> d;
  const auto x = access.load(d, a), y = access.load(d, b);
  access.store(d, y, a);
  access.store(d, x, b);
}

/// Two ranges of 16-bit words, which all four dtypes are made of.
inline void swap_words(uint16_t* a, uint16_t* b, size_t count) {
  const size_t lanes = hn::Lanes(hn::ScalableTag<uint16_t>());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) swap_equal(Whole{}, a + i, b + i);
  if (i < count) swap_equal(First{count - i}, a + i, b + i);
}

/// exchange() for the lanes of one vector.
template <class A>
HWY_INLINE void exchange_lanes(A access, uint16_t* parameter, uint32_t* average, Direction direction) {
  const hn::ScalableTag<uint32_t> d;
  const hn::ScalableTag<float> df;
  const hn::Rebind<uint16_t, decltype(d)> narrow_bits;
  const auto wide = access.load(d, average);
  const auto p = hn::PromoteTo(d, access.load(narrow_bits, parameter));
  const auto lo = hn::And(wide, hn::Set(d, 0xffff)), hi = hn::ShiftRight<16>(wide);
  const bool in = direction == Direction::kIn;
  const auto from = in ? hi : p;
  const auto magnitude = hn::And(from, hn::Set(d, 0x7fff)), sign = hn::And(from, hn::Set(d, 0x8000));
  const auto one = hn::Set(d, 1), lost = hn::Set(d, 0x7f80);
  hn::Vec<decltype(d)> moved;
  if (in) {
    moved = hn::IfThenElse(hn::Gt(lost, magnitude), hn::Add(magnitude, one),
                           hn::IfThenZeroElse(hn::Eq(magnitude, lost), magnitude));
  } else {
    moved = hn::IfThenElse(hn::Gt(magnitude, lost), magnitude, hn::Sub(magnitude, one));
    moved = hn::IfThenElse(hn::Eq(magnitude, hn::Zero(d)), lost, moved);
  }
  const auto to = hn::IfThenElse(hn::Gt(lo, hn::Set(d, 0x7fff)), hn::Or(sign, moved), from);
  store_16_bits(df, access, in ? to : hi, parameter);
  access.store(d, hn::Or(hn::ShiftLeft<16>(in ? p : to), lo), average);
}

inline void exchange_all(uint16_t* parameter, uint32_t* average, size_t count, Direction direction) {
  const size_t lanes = hn::Lanes(hn::ScalableTag<uint32_t>());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) exchange_lanes(Whole{}, parameter + i, average + i, direction);
  if (i < count) exchange_lanes(First{count - i}, parameter + i, average + i, direction);
}

template <class From, class To>
HWY_NOINLINE void cast_all(const From* from, To* to, size_t count) {
  if constexpr (std::is_same_v<From, double> && is_16_bit<To>) {  // rare, and needs rounding to odd
    for (size_t i = 0; i < count; ++i) to[i] = convert<To>(from[i]);
  } else {
    const hn::ScalableTag<float> d;  // a vector of doubles is two of its halves
    const size_t lanes = hn::Lanes(d);
    size_t i = 0;
    for (; i + lanes <= count; i += lanes) store(d, Whole{}, load(d, Whole{}, from + i), to + i);
    if (i < count) store(d, First{count - i}, load(d, First{count - i}, from + i), to + i);
  }
}

}  // namespace shardow::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // SHARDOW_VECTORS

#endif  // per-target include guard
