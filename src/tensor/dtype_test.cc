#include "tensor/dtype.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>

#include "base/errors.h"

namespace shardow {
namespace {

// The names and sizes of safetensors 0.8 (tensor.rs, enum Dtype), in its order.
struct Named {
  DType dtype;
  const char* name;
  int bits;
  bool floating;
};
constexpr Named kNamed[] = {
    {DType::kBool, "BOOL", 8, false},
    {DType::kF4, "F4", 4, true},
    {DType::kF6E2M3, "F6_E2M3", 6, true},
    {DType::kF6E3M2, "F6_E3M2", 6, true},
    {DType::kU8, "U8", 8, false},
    {DType::kI8, "I8", 8, false},
    {DType::kF8E5M2, "F8_E5M2", 8, true},
    {DType::kF8E4M3, "F8_E4M3", 8, true},
    {DType::kF8E8M0, "F8_E8M0", 8, true},
    {DType::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8, true},
    {DType::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8, true},
    {DType::kI16, "I16", 16, false},
    {DType::kU16, "U16", 16, false},
    {DType::kF16, "F16", 16, true},
    {DType::kBF16, "BF16", 16, true},
    {DType::kI32, "I32", 32, false},
    {DType::kU32, "U32", 32, false},
    {DType::kF32, "F32", 32, true},
    {DType::kC64, "C64", 64, false},
    {DType::kF64, "F64", 64, true},
    {DType::kI64, "I64", 64, false},
    {DType::kU64, "U64", 64, false},
};

TEST(DTypes, NamesAndSizesAreThoseOfSafetensors) {
  for (const Named& row : kNamed) {
    EXPECT_EQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(dtype_from_name(row.name), row.dtype);
    EXPECT_EQ(dtype_bits(row.dtype), row.bits) << row.name;
    EXPECT_EQ(is_floating(row.dtype), row.floating) << row.name;
    EXPECT_EQ(byte_size(row.dtype, 24), 3 * row.bits) << row.name;
    EXPECT_EQ(byte_size(row.dtype, 0), 0) << row.name;
  }
}

TEST(DTypes, OtherNamesAreRefused) {
  for (const char* name : {"", "f32", "F32 ", "float32", "F8"}) {
    EXPECT_EQ(find_dtype(name), std::nullopt) << name;
    EXPECT_THROW(dtype_from_name(name), Error) << name;
  }
}

TEST(DTypes, PackedElementsFillWholeBytes) {
  EXPECT_EQ(byte_size(DType::kF4, 2), 1);
  EXPECT_EQ(byte_size(DType::kF6E2M3, 4), 3);
  for (const auto& [dtype, count] : {std::pair{DType::kF4, 3}, {DType::kF6E2M3, 2}, {DType::kF6E3M2, 9}})
    EXPECT_THROW(byte_size(dtype, count), Error);
}

TEST(DTypes, SizesDoNotWrap) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(byte_size(DType::kU8, kMax), kMax);
  EXPECT_EQ(byte_size(DType::kF4, kMax - 1), kMax / 2);
  EXPECT_EQ(byte_size(DType::kF64, kMax / 8), kMax / 8 * 8);
  EXPECT_THROW(byte_size(DType::kF64, kMax / 8 + 1), Error);
  EXPECT_THROW(byte_size(DType::kF32, -1), Error);
}

}  // namespace
}  // namespace shardow
