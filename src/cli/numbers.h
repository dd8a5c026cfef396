// The numbers of stored tensors, whatever their dtype.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cli/sources.h"
#include "file/catalog.h"

namespace shardow::cli {

inline constexpr int64_t kMostNumbers = 1024;       ///< that to_numbers() converts at once
inline constexpr int64_t kMostElements = 32 << 10;  ///< that are read at once: 256 KiB of the widest dtype

bool has_values(DType dtype) noexcept;  ///< F4 and F6 have none here

/// Converts `count` elements, at most kMostNumbers; a C64 is two numbers. A long double has every I64 and U64.
void to_numbers(const std::byte* from, DType dtype, long double* to, int64_t count) noexcept;

/// Reads elements [begin, end) as they are stored.
void read_elements(const file::Catalog& catalog, const file::Stored& stored, int64_t begin, int64_t end,
                   std::vector<std::byte>& memory);

struct Extremes {
  int64_t numbers = 0, nan = 0, infinite = 0;
  long double least = 0, most = 0;  ///< of the finite ones, where there are any

  bool has_finite() const noexcept { return numbers > nan + infinite; }
};

/// Reads all of a tensor, chunk by chunk.
Extremes extremes_of(const file::Catalog& catalog, const file::Stored& stored);

}  // namespace shardow::cli
