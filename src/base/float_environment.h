// The floating-point environment that our numbers are defined in: IEEE 754, to nearest, subnormals kept, nothing
// trapped.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#else
#include <cfenv>
#endif

namespace shardow::base {

/// While it lives, this thread computes in that environment, whatever the caller has set (flush-to-zero is per thread,
/// and threads take it from whoever starts them). Then the caller's is back, its exception flags included. Once for a
/// call, not an element: a few ns on x86-64, where <cfenv> would take 0.1 us, which is what a small tensor's average
/// takes.
class FloatEnvironment {
 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

#if defined(__x86_64__)
  FloatEnvironment() noexcept : vectors_(_mm_getcsr()) {
    asm volatile("fnstcw %0" : "=m"(scalars_));
    if (vectors_ != kVectors) _mm_setcsr(kVectors);
    if (scalars_ != kScalars) asm volatile("fldcw %0" : : "m"(kScalars));
  }
  ~FloatEnvironment() {
    _mm_setcsr(vectors_);
    if (scalars_ != kScalars) asm volatile("fldcw %0" : : "m"(scalars_));
  }

 private:
  // Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1: MXCSR and the control word of the x87 as
  // they are at power-up, and as the psABI says that a process begins.
  static constexpr uint32_t kVectors = 0x1f80;
  static constexpr uint16_t kScalars = 0x037f;

  uint32_t vectors_;
  uint16_t scalars_ = 0;
#else
  FloatEnvironment() noexcept {
    std::fegetenv(&caller_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() {
    std::fesetenv(&caller_);
  }

 private:
  std::fenv_t caller_;
#endif
};

}  // namespace shardow::base
