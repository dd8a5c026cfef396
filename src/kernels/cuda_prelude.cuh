// Stands in for the C and C++ libraries' headers, as far as the kernels use them, for NVRTC, which has neither: its
// programs begin with this file, and the libraries' headers are empty there.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;

namespace std {

template <class A, class B>
inline constexpr bool is_same_v = false;
template <class A>
inline constexpr bool is_same_v<A, A> = true;

template <bool kFirst, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool kFirst, class A, class B>
using conditional_t = typename conditional<kFirst, A, B>::type;

template <class T, unsigned long kSize>
struct array {
  T items[kSize];
  __device__ T* data() { return items; }
  __device__ const T* data() const { return items; }
};

}  // namespace std
