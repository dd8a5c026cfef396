// Conversions against an oracle that knows only the formats' definitions: every value of a 16-bit format by ldexp,
// rounding by looking at the two neighbours.
#include "kernels/bits.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace shardow::kernels {
namespace {

struct Format {
  const char* name;
  int mantissa_bits, bias, infinity;  // infinity: its bits
};
constexpr Format kBf16{"bf16", 7, 127, 0x7f80}, kF16{"f16", 10, 15, 0x7c00};

/// The value of positive finite bits; at infinity what would come next, so that rounding to infinity needs no case of
/// its own.
double decode(const Format& format, int bits) {
  const int exponent = bits >> format.mantissa_bits, mantissa = bits & ((1 << format.mantissa_bits) - 1);
  if (exponent == 0) return std::ldexp(mantissa, 1 - format.bias - format.mantissa_bits);
  return std::ldexp((1 << format.mantissa_bits) + mantissa, exponent - format.bias - format.mantissa_bits);
}

/// The nearest of all values to a finite x, ties to even.
uint16_t round(const Format& format, double x) {
  const double magnitude = std::fabs(x);
  int low = 0, high = format.infinity;
  if (magnitude >= decode(format, high)) {
    low = high;
  }
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (decode(format, middle) <= magnitude ? low : high) = middle;
  }
  const double half = (decode(format, low) + decode(format, high)) / 2;  // exact
  int bits = low;
  if (high > low && (magnitude > half || (magnitude == half && low % 2 == 1))) bits = high;
  return static_cast<uint16_t>(bits | (std::signbit(x) ? 0x8000 : 0));
}

template <class To, class From>
void expect_rounds(const Format& format, From x) {
  ASSERT_EQ(convert<To>(x).bits, round(format, static_cast<double>(x))) << format.name << " of " << x;
}

template <class To>
class Narrow : public ::testing::Test {
 public:
  static constexpr Format format() { return std::is_same_v<To, BF16> ? kBf16 : kF16; }
};
using NarrowTypes = ::testing::Types<BF16, F16>;
TYPED_TEST_SUITE(Narrow, NarrowTypes);

TYPED_TEST(Narrow, WidensEveryFiniteValueExactly) {
  for (int bits = 0; bits < this->format().infinity; ++bits) {
    ASSERT_EQ(convert<float>(TypeParam{static_cast<uint16_t>(bits)}), decode(this->format(), bits)) << bits;
    ASSERT_EQ(convert<float>(TypeParam{static_cast<uint16_t>(bits | 0x8000)}), -decode(this->format(), bits)) << bits;
  }
}

TYPED_TEST(Narrow, ComesBackFromFloatAndDouble) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const TypeParam value{static_cast<uint16_t>(bits)};
    if (convert<float>(value) != convert<float>(value)) continue;
    ASSERT_EQ(convert<TypeParam>(convert<float>(value)).bits, bits);
    ASSERT_EQ(convert<TypeParam>(convert<double>(value)).bits, bits);
  }
}

TYPED_TEST(Narrow, RoundsToNearestEvenAroundEveryValueAndMidpoint) {
  for (int bits = 0; bits < this->format().infinity; ++bits) {
    const double value = decode(this->format(), bits), half = (value + decode(this->format(), bits + 1)) / 2;
    for (const double x : {value, half}) {
      for (const double sign : {1.0, -1.0}) {
        const auto single = static_cast<float>(sign * x);
        expect_rounds<TypeParam>(this->format(), single);
        if (single < 3e38f && single > -3e38f) {
          expect_rounds<TypeParam>(this->format(), std::nextafter(single, HUGE_VALF));
          expect_rounds<TypeParam>(this->format(), std::nextafter(single, -HUGE_VALF));
        }
        // Nearer to a midpoint than a float can be: a rounding by way of float would go wrong.
        expect_rounds<TypeParam>(this->format(), std::nextafter(sign * x, HUGE_VAL));
        expect_rounds<TypeParam>(this->format(), std::nextafter(sign * x, -HUGE_VAL));
      }
    }
  }
}

TYPED_TEST(Narrow, RoundsRandomDoublesOnce) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const double x =
        std::ldexp(std::uniform_real_distribution(-2.0, 2.0)(random), static_cast<int>(random() % 300) - 160);
    expect_rounds<TypeParam>(this->format(), x);
    expect_rounds<TypeParam>(this->format(), static_cast<float>(x));
  }
}

TYPED_TEST(Narrow, OverflowsToInfinity) {
  for (const double x : {3.4e38, 1e300, HUGE_VAL}) {
    EXPECT_EQ(convert<TypeParam>(x).bits, this->format().infinity);
    EXPECT_EQ(convert<TypeParam>(-x).bits, this->format().infinity | 0x8000);
  }
  EXPECT_EQ(convert<TypeParam>(HUGE_VALF).bits, this->format().infinity);
}

TYPED_TEST(Narrow, KeepsNanQuietWithItsSign) {
  for (const uint32_t payload : {1u, 0x1fffu, 0x2000u, 0xffffu, 0x10000u, 0x400000u, 0x7fffffu}) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float nan = float_of(sign | 0x7f800000u | payload);
      const int quiet = (this->format().infinity >> this->format().mantissa_bits << this->format().mantissa_bits) |
                        1 << (this->format().mantissa_bits - 1);
      EXPECT_EQ(convert<TypeParam>(nan).bits,
                (sign >> 16) | static_cast<uint32_t>(quiet) | payload >> (23 - this->format().mantissa_bits))
          << payload;
      EXPECT_EQ(convert<TypeParam>(widen(nan)).bits, convert<TypeParam>(nan).bits);
    }
  }
}

TEST(Narrow, FloatsAndDoublesKeepNanPayloads) {
  EXPECT_EQ(bits_of(widen(float_of(0xff800001u))), 0xfff8000020000000u);
  EXPECT_EQ(bits_of(narrow(double_of(0x7ff0000020000000u))), 0x7fc00001u);
  EXPECT_EQ(bits_of(narrow(double_of(0x7ff0000000000001u))), 0x7fc00000u);
  EXPECT_EQ(bits_of(to_float(F16{0xfc01})), 0xffc02000u);
  EXPECT_EQ(bits_of(to_float(BF16{0x7f81})), 0x7f810000u);
}

}  // namespace
}  // namespace shardow::kernels
