// The arithmetic of one element, defined once: what "bit-identical" means here. Host and CUDA compile this very code
// (without contraction: every fused multiply-add is written out), and the Highway kernels are tested against it bit for
// bit.
//
// T is the computing type: double for float64 averages, float for all others. p and e are the parameter and the average
// in T, W = T(weight), D = T(decay). n is a draw of noise, an odd integer times 2^-17: 16 bits, in (-1/2, 1/2),
// symmetric, so that its mean is exactly 0.
//
//   kCopy         p, rounded to nearest even
//   kLerp         W < 1/2: fma(W, p - e, e)     else fma(W - 1, p - e, p)      torch.lerp
//   kMulAdd       fma(p, W, round(e D))                                        e.mul_(d).add_(p, alpha=1-d)
//   kTwoProducts  round(e D) + round(p W)                                      e*d + (1.-d)*p (timm's ModelEma)
//   kDifference   e - round(W (e - p))                                         e.sub_(w * (e - p)) (torch-ema,
//   diffusers) kFusedDifference  fma(W, p - e, e)                                         e.sub_(e - p, alpha=w)
//   (diffusers with foreach) kQuotient     e + round((p - e) / D), D = T(1 / weight), a whole number where that is near
//   one
//                                                                               e + (p - e) / (n + 1) (torch's SWA)
//   kStochastic   float32 averages, W < 1/2: e + fma(W, p - e, n ulp(e)); without noise where p = e, so that a weight
//   at rest keeps its average.
//                 W >= 1/2 and float64 averages: kLerp.
//   16-bit averages (every form but kCopy): q = W (p - e) / ulp(e); |q| < 1: e + rint(q + n) ulp(e), else fma(W, p - e,
//   e); then stochastically rounded with
//                 a second draw, for where a power of two was crossed. A finite result never rounds to Inf. q never
//                 passes through the sum e + W (p - e), whose own rounding would swallow it.
//
// A NaN result is the canonical quiet NaN: which operand's payload survives, and the sign of Inf - Inf, differ between
// processors.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/bits.h"
#include "kernels/noise.h"
#include "kernels/step.h"

namespace shardow::kernels {

template <class S>
using Computing = std::conditional_t<std::is_same_v<S, double>, double, float>;

/// A Form with its conditions resolved: what is left to decide per block is one switch.
enum class Op : uint8_t {
  kCopy,
  kLerp,
  kLerpFromParameter,
  kMulAdd,
  kTwoProducts,
  kDifference,
  kQuotient,
  kStochastic,
  kIntegerStep
};

template <class T>
struct Formula {
  Op op;
  T weight;  ///< W; W - 1 for kLerpFromParameter, D for kQuotient
  T decay;
};

SHARDOW_HD constexpr bool draws(Op op) {
  return op == Op::kStochastic || op == Op::kIntegerStep;
}

/// 1 / weight; weights are 1 / n rounded, and n is meant.
SHARDOW_HD double divisor(double weight) {
  const double quotient = 1 / weight, whole = rint(quotient);
  return fabs(quotient - whole) < 1e-9 * whole ? whole : quotient;
}

template <class S>
SHARDOW_HD Formula<Computing<S>> resolve(const Step::One& one) {
  using T = Computing<S>;
  const T weight = static_cast<T>(one.weight), decay = static_cast<T>(one.decay);
  if (one.form == Form::kCopy) return {Op::kCopy, weight, decay};
  if constexpr (is_16_bit<S>) return {Op::kIntegerStep, weight, decay};
  if (one.form == Form::kMulAdd) return {Op::kMulAdd, weight, decay};
  if (one.form == Form::kTwoProducts) return {Op::kTwoProducts, weight, decay};
  if (one.form == Form::kDifference) return {Op::kDifference, weight, decay};
  if (one.form == Form::kQuotient) return {Op::kQuotient, static_cast<T>(divisor(one.weight)), decay};
  if (one.form == Form::kFusedDifference) return {Op::kLerp, weight, decay};
  if (!(weight < T(0.5))) return {Op::kLerpFromParameter, weight - T(1), decay};
  const bool stochastic = one.form == Form::kStochastic && std::is_same_v<T, float>;
  return {stochastic ? Op::kStochastic : Op::kLerp, weight, decay};
}

SHARDOW_HD float canonical(float x) {
  return x == x ? x : float_of(0x7fc00000u);
}
SHARDOW_HD double canonical(double x) {
  return x == x ? x : double_of(0x7ff8000000000000u);
}

/// The spacing of a 16-bit format around a float: 2^exponent, where exponents below the format's own (or below 2^-119
/// for bfloat16, to keep 1 / ulp a float) count as the least.
template <class S>
struct Grid {
  static constexpr int kMantissaBits = std::is_same_v<S, BF16> ? 7 : 10;
  static constexpr uint32_t kLeastBinade = (std::is_same_v<S, BF16> ? 8u : 113u) << 23;
  static constexpr float kUlpOfOne = 1.0f / (1 << kMantissaBits);
  static constexpr uint32_t kInverse = static_cast<uint32_t>(254 + kMantissaBits)
                                       << 23;  ///< minus a binade's bits: the bits of 1 / ulp
};

template <class S>
SHARDOW_HD uint32_t binade_bits(float x) {
  const uint32_t bits = bits_of(x) & 0x7f800000u;
  return bits > Grid<S>::kLeastBinade ? bits : Grid<S>::kLeastBinade;
}

SHARDOW_HD BF16 round_stochastically_bf16(float x, uint32_t draw) {
  if (x != x) return {0x7fc0};
  const uint32_t sign = bits_of(x) & 0x80000000u, magnitude = bits_of(x) & 0x7fffffffu;
  uint32_t rounded = magnitude + draw;
  if (rounded > 0x7f7fffffu) rounded = magnitude == 0x7f800000u ? magnitude : 0x7f7fffffu;
  return {static_cast<uint16_t>((sign | rounded) >> 16)};
}

SHARDOW_HD F16 round_stochastically_f16(float x, uint32_t draw) {
  if (x != x) return {0x7e00};
  const uint32_t sign = bits_of(x) & 0x80000000u, bits = bits_of(x) & 0x7fffffffu;
  if (bits == 0x7f800000u) return {static_cast<uint16_t>(sign >> 16 | 0x7c00)};
  const float magnitude = float_of(bits) < 65504.0f ? float_of(bits) : 65504.0f;
  // In units of ulp / 2^16 the magnitude is an integer below 2^27 (but for what lies below 2^-40, which is cut off).
  const uint32_t binade = binade_bits<F16>(magnitude);
  const uint32_t units = static_cast<uint32_t>(magnitude * float_of(Grid<F16>::kInverse - binade) * 65536.0f);
  const float rounded = static_cast<float>((units + draw) >> 16) * (float_of(binade) * Grid<F16>::kUlpOfOne);
  return to_f16(float_of(sign | bits_of(rounded)));
}

/// A step up from the largest bfloat16 would leave float's range.
SHARDOW_HD float clamped(float x) {
  constexpr float kLargest = 0x1.fffffep127f;
  return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
}

template <class S>
SHARDOW_HD S integer_step(float weight, float p, float e, uint32_t noise) {
  const uint32_t binade = binade_bits<S>(e);
  const float ulp = float_of(binade) * Grid<S>::kUlpOfOne, difference = p - e;
  const float q = weight * (difference * float_of(Grid<S>::kInverse - binade));
  const float draw = static_cast<float>(odd_draw(noise)) * 0x1p-17f;
  const float sum = q > -1.0f && q < 1.0f ? clamped(e + rintf(q + draw) * ulp) : fused(weight, difference, e);
  if constexpr (std::is_same_v<S, BF16>) {
    return round_stochastically_bf16(sum, second_draw(noise));
  } else {
    return round_stochastically_f16(sum, second_draw(noise));
  }
}

SHARDOW_HD float stochastic_lerp(float weight, float p, float e, uint32_t noise) {
  const float difference = p - e, binade = float_of(bits_of(e) & 0x7f800000u);
  const float shift =
      difference == 0 ? 0.0f : binade * (static_cast<float>(odd_draw(noise)) * 0x1p-40f);  // ulp(e) = binade * 2^-23
  return e + fused(weight, difference, shift);
}

/// The new average under an operation known at compile time. `noise` is read only where draws(kOp).
template <Op kOp, class S, class T = Computing<S>>
SHARDOW_HD S next_as(T w, T decay, T p, S average, uint32_t noise) {
  if constexpr (kOp == Op::kCopy) {
    return convert<S>(p);
  } else if constexpr (is_16_bit<S>) {
    return integer_step<S>(w, p, to_float(average), noise);
  } else if constexpr (kOp == Op::kLerpFromParameter) {
    return canonical(fused(w, p - average, p));
  } else if constexpr (kOp == Op::kMulAdd) {
    return canonical(fused(p, w, average * decay));
  } else if constexpr (kOp == Op::kTwoProducts) {
    return canonical(average * decay + p * w);
  } else if constexpr (kOp == Op::kDifference) {
    return canonical(average - w * (average - p));
  } else if constexpr (kOp == Op::kQuotient) {
    return canonical(average + (p - average) / w);
  } else if constexpr (kOp == Op::kStochastic && std::is_same_v<S, float>) {
    return canonical(stochastic_lerp(w, p, average, noise));
  } else {
    return canonical(fused(w, p - average, average));
  }
}

/// Calls visit.template operator()<op>() with the operation of an S as a constant: one switch, outside of any loop over
/// elements. resolve() gives 16-bit averages two.
template <class S, class Visit>
SHARDOW_HD auto with_op(Op op, Visit&& visit) {
  if (op == Op::kCopy) return visit.template operator()<Op::kCopy>();
  if constexpr (is_16_bit<S>) {
    return visit.template operator()<Op::kIntegerStep>();
  } else {
    switch (op) {
      case Op::kLerpFromParameter: return visit.template operator()<Op::kLerpFromParameter>();
      case Op::kMulAdd: return visit.template operator()<Op::kMulAdd>();
      case Op::kTwoProducts: return visit.template operator()<Op::kTwoProducts>();
      case Op::kDifference: return visit.template operator()<Op::kDifference>();
      case Op::kQuotient: return visit.template operator()<Op::kQuotient>();
      case Op::kStochastic: return visit.template operator()<Op::kStochastic>();
      default: return visit.template operator()<Op::kLerp>();
    }
  }
}

template <class S, class T = Computing<S>>
SHARDOW_HD S next(const Formula<T>& formula, T p, S average, uint32_t noise) {
  return with_op<S>(formula.op,
                    [&]<Op kOp>() { return next_as<kOp, S>(formula.weight, formula.decay, p, average, noise); });
}

}  // namespace shardow::kernels
