// What an element type is called and how large it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "shardow/tensor_view.h"

namespace shardow {

/// As safetensors spells it: "F32", "BF16", "F8_E4M3", "BOOL".
std::string_view dtype_name(DType dtype) noexcept;

std::optional<DType> find_dtype(std::string_view name) noexcept;  ///< nothing for a name that safetensors does not have
DType dtype_from_name(std::string_view name);                     ///< throws kInvalidArgument for such a name

int dtype_bits(DType dtype) noexcept;  ///< of one element: 4, 6, 8, 16, 32 or 64

/// Real floating point: not integers, not BOOL, not C64.
bool is_floating(DType dtype) noexcept;

/// Bytes of `count` elements, packed. Throws kInvalidArgument where that does not fit in 64 bits, is negative, or (F4,
/// F6) is not a whole number of bytes.
int64_t byte_size(DType dtype, int64_t count);

/// Where an element of the view's memory begins; `element`: its index among those that the rank holds.
inline std::byte* data_at(const TensorView& view, int64_t element) {
  return static_cast<std::byte*>(view.data) + byte_size(view.dtype, element);
}

}  // namespace shardow
