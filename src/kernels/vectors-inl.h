// Loads and stores of every storage type as vectors of the computing type, whole or the first n lanes. A partial access
// touches no byte outside its n elements: neighbours may belong to another thread.
#include "hwy/highway.h"
#include "kernels/bits.h"
#include "kernels/kernels.h"

#if defined(SHARDOW_KERNELS_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SHARDOW_KERNELS_VECTORS_INL_H_
#undef SHARDOW_KERNELS_VECTORS_INL_H_
#else
#define SHARDOW_KERNELS_VECTORS_INL_H_
#endif

// Whether this target has what the vector code needs; the others use the reference. Vectors without a fixed size cannot
// stand in arrays.
#undef SHARDOW_VECTORS
#if HWY_NATIVE_FMA && HWY_HAVE_FLOAT16 && HWY_HAVE_FLOAT64 && !HWY_HAVE_SCALABLE
#define SHARDOW_VECTORS 1
#else
#define SHARDOW_VECTORS 0
#endif

#if SHARDOW_VECTORS
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace shardow::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// All lanes of a vector.
struct Whole {
  template <class D, class T = hn::TFromD<D>>
  HWY_INLINE hn::Vec<D> load(D d, const T* from) const {
    return hn::LoadU(d, from);
  }
  template <class D, class T = hn::TFromD<D>>
  HWY_INLINE void store(D d, hn::Vec<D> v, T* to) const {
    hn::StoreU(v, d, to);
  }
  HWY_INLINE Whole after(size_t /*lanes*/) const { return {}; }
};

/// The first n lanes; the others are zero when loaded.
struct First {
  size_t n;

  template <class T>
  static constexpr bool kMasked = !HWY_MEM_OPS_MIGHT_FAULT || (HWY_TARGET == HWY_AVX2 && sizeof(T) >= 4);

  template <class D, class T = hn::TFromD<D>>
  HWY_INLINE hn::Vec<D> load(D d, const T* from) const {
    const size_t lanes = HWY_MIN(n, hn::MaxLanes(d));
    if constexpr (kMasked<T>) {
      return hn::MaskedLoad(hn::FirstN(d, lanes), d, from);
    } else {
      alignas(64) T copy[hn::MaxLanes(d)] = {};
      std::memcpy(copy, from, lanes * sizeof(T));
      return hn::Load(d, copy);
    }
  }
  template <class D, class T = hn::TFromD<D>>
  HWY_INLINE void store(D d, hn::Vec<D> v, T* to) const {
    const size_t lanes = HWY_MIN(n, hn::MaxLanes(d));
    if constexpr (kMasked<T>) {
      hn::BlendedStore(v, hn::FirstN(d, lanes), d, to);
    } else {
      alignas(64) T copy[hn::MaxLanes(d)];
      hn::Store(v, d, copy);
      std::memcpy(to, copy, lanes * sizeof(T));
    }
  }
  HWY_INLINE First after(size_t lanes) const { return {n > lanes ? n - lanes : 0}; }
};

template <class D>
concept OfFloats = std::is_same_v < hn::TFromD<D>,
float > ;
template <class D>
concept OfDoubles = std::is_same_v < hn::TFromD<D>,
double > ;

template <class D>
using BitsOf = hn::Vec<hn::RebindToUnsigned<D>>;

// ---- to the computing type: load(tag of float or double, pointer to storage)

template <class D, class A>
HWY_INLINE hn::Vec<D> load(D d, A access, const hn::TFromD<D>* from) {
  return access.load(d, from);
}

template <OfFloats D, class A>
HWY_INLINE hn::Vec<D> load(D d, A access, const BF16* from) {
  const hn::Rebind<uint16_t, D> narrow_bits;
  const hn::Rebind<uint32_t, D> wide_bits;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(
                            wide_bits, access.load(narrow_bits, reinterpret_cast<const uint16_t*>(from)))));
}

template <OfFloats D, class A>
HWY_INLINE hn::Vec<D> load(D d, A access, const F16* from) {
  const hn::Rebind<uint16_t, D> narrow_bits;
  const hn::Rebind<hwy::float16_t, D> half;
  return hn::PromoteTo(d, hn::BitCast(half, access.load(narrow_bits, reinterpret_cast<const uint16_t*>(from))));
}

template <OfFloats D, class A>
HWY_INLINE hn::Vec<D> load(D d, A access, const double* from) {
  const hn::Half<D> half;
  const hn::Rebind<double, decltype(half)> wide;
  const size_t lanes = hn::Lanes(half);
  const auto lower = hn::DemoteTo(half, access.load(wide, from)),
             upper = hn::DemoteTo(half, access.after(lanes).load(wide, from + lanes));
  return hn::Combine(d, upper, lower);
}

template <OfDoubles D, class A, class From>
requires(!std::is_same_v<From, double>) HWY_INLINE hn::Vec<D> load(D d, A access, const From* from) {
  return hn::PromoteTo(d, load(hn::Rebind<float, D>(), access, from));
}

// ---- from the computing type

template <class D, class A>
HWY_INLINE void store(D d, A access, hn::Vec<D> v, hn::TFromD<D>* to) {
  access.store(d, v, to);
}

/// Lanes of 32 bits whose upper half is zero, as 16 bits each. (Signed, as that is what DemoteTo takes.)
template <class D, class A>
HWY_INLINE void store_16_bits(D /*float*/, A access, BitsOf<D> bits, uint16_t* to) {
  const hn::Rebind<uint16_t, D> narrow_bits;
  access.store(narrow_bits, hn::DemoteTo(narrow_bits, hn::BitCast(hn::RebindToSigned<D>(), bits)), to);
}

/// The bits of floats, rounded to bfloat16: sixteen in the upper half, nothing below.
template <OfFloats D>
HWY_INLINE BitsOf<D> bf16_bits(D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, v), upper_half = hn::Set(du, 0xffff0000u);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(hn::Add(bits, odd), hn::Set(du, 0x7fff)), quiet = hn::Or(bits, hn::Set(du, 0x400000));
  return hn::And(hn::IfThenElse(hn::RebindMask(du, hn::Eq(v, v)), rounded, quiet), upper_half);
}

template <OfFloats D, class A>
HWY_INLINE void store(D d, A access, hn::Vec<D> v, BF16* to) {
  store_16_bits(d, access, hn::ShiftRight<16>(bf16_bits(d, v)), reinterpret_cast<uint16_t*>(to));
}

template <OfFloats D, class A>
HWY_INLINE void store(D /*d*/, A access, hn::Vec<D> v, F16* to) {
  const hn::Rebind<uint16_t, D> narrow_bits;
  const hn::Rebind<hwy::float16_t, D> half;
  access.store(narrow_bits, hn::BitCast(narrow_bits, hn::DemoteTo(half, v)), reinterpret_cast<uint16_t*>(to));
}

template <OfFloats D, class A>
HWY_INLINE void store(D d, A access, hn::Vec<D> v, double* to) {
  const hn::Half<D> half;
  const hn::Rebind<double, decltype(half)> wide;
  const size_t lanes = hn::Lanes(half);
  access.store(wide, hn::PromoteTo(wide, hn::LowerHalf(half, v)), to);
  access.after(lanes).store(wide, hn::PromoteTo(wide, hn::UpperHalf(half, v)), to + lanes);
}

}  // namespace shardow::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // SHARDOW_VECTORS

#endif  // per-target include guard
