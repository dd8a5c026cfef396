// Stored elements of any dtype as float64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shardow/tensor_view.h"

namespace shardow::cli {

bool has_values(DType dtype) noexcept;  ///< F4 and F6 have none here: their bytes are compared, and no numbers

/// `count` elements; a C64 counts as two. I64 and U64 beyond 2^53 are rounded.
void to_doubles(const std::byte* from, DType dtype, double* to, int64_t count) noexcept;

bool has_rests(DType dtype) noexcept;  ///< I64 and U64: some of them lie between two float64

/// What to_doubles() rounded away, 0 of other dtypes: both together are the exact number.
void to_rests(const std::byte* from, DType dtype, double* to, int64_t count) noexcept;

}  // namespace shardow::cli
