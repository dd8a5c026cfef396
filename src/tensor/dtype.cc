// One table; a row per element type, in the order of DType.
#include "tensor/dtype.h"

#include <array>

#include "base/checked.h"

namespace shardow {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int bits;
  bool floating;
};

constexpr std::array kRows = {
    Row{DType::kBool, "BOOL", 8, false},
    Row{DType::kF4, "F4", 4, true},
    Row{DType::kF6E2M3, "F6_E2M3", 6, true},
    Row{DType::kF6E3M2, "F6_E3M2", 6, true},
    Row{DType::kU8, "U8", 8, false},
    Row{DType::kI8, "I8", 8, false},
    Row{DType::kF8E5M2, "F8_E5M2", 8, true},
    Row{DType::kF8E4M3, "F8_E4M3", 8, true},
    Row{DType::kF8E8M0, "F8_E8M0", 8, true},
    Row{DType::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8, true},
    Row{DType::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8, true},
    Row{DType::kI16, "I16", 16, false},
    Row{DType::kU16, "U16", 16, false},
    Row{DType::kF16, "F16", 16, true},
    Row{DType::kBF16, "BF16", 16, true},
    Row{DType::kI32, "I32", 32, false},
    Row{DType::kU32, "U32", 32, false},
    Row{DType::kF32, "F32", 32, true},
    Row{DType::kC64, "C64", 64, false},
    Row{DType::kF64, "F64", 64, true},
    Row{DType::kI64, "I64", 64, false},
    Row{DType::kU64, "U64", 64, false},
};

constexpr bool in_order() {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<size_t>(kRows[i].dtype) != i) return false;
  }
  return kRows.size() == static_cast<size_t>(DType::kU64) + 1;
}
static_assert(in_order());

const Row& row(DType dtype) noexcept {
  return kRows[static_cast<size_t>(dtype)];
}

}  // namespace

std::string_view dtype_name(DType dtype) noexcept {
  return row(dtype).name;
}

std::optional<DType> find_dtype(std::string_view name) noexcept {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

DType dtype_from_name(std::string_view name) {
  const std::optional<DType> found = find_dtype(name);
  if (!found)
    base::fail(Code::kInvalidArgument,
               "no dtype is named '{}'; names are those of safetensors, such as F32, BF16 or I64", name);
  return *found;
}

int dtype_bits(DType dtype) noexcept {
  return row(dtype).bits;
}

bool is_floating(DType dtype) noexcept {
  return row(dtype).floating;
}

int64_t byte_size(DType dtype, int64_t count) {
  const int bits = dtype_bits(dtype);
  if (count < 0) base::fail(Code::kInvalidArgument, "{} elements of {}", count, dtype_name(dtype));
  if (bits >= 8) return base::checked_mul(count, bits / 8);
  // Eight elements fill `bits` bytes; what is left of them must fill whole bytes too.
  const int64_t rest = count % 8 * bits;
  if (rest % 8 != 0)
    base::fail(Code::kInvalidArgument, "{} elements of {} ({} bits each) do not fill whole bytes", count,
               dtype_name(dtype), bits);
  return count / 8 * bits + rest / 8;
}

}  // namespace shardow
