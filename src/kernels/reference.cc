// The oracle: plain loops over arithmetic.h and exchange.h, element by element. Slow and obvious; every other kernel is
// tested against it bit for bit, and processors without a fused multiply-add run it (std::fma in software is slow, but
// right).
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/float_environment.h"
#include "kernels/exchange.h"
#include "kernels/kernels.h"
#include "kernels/row.h"
#include "kernels/sums.h"

namespace shardow::kernels {

bool is_averaged_dtype(DType dtype) noexcept {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF64;
}

bool swaps_in_place(DType parameter, DType average) noexcept {
  return is_averaged_dtype(parameter) &&
         (parameter == average || (parameter == DType::kBF16 && average == DType::kF32));
}

namespace reference {

Tally update(std::span<const Chunk> chunks, const Step& step) noexcept {
  const base::FloatEnvironment environment;
  Tally tally;
  for (size_t c = 0; c < chunks.size(); ++c) {
    with_dtype(chunks[c].parameter_dtype, [&]<class P>() {
      with_dtype(chunks[c].average_dtype,
                 [&]<class S>() { add(tally, update_elements(Row<P, S>(chunks[c], step), 0, chunks[c].count), c); });
    });
  }
  return tally;
}

void swap(void* parameter, DType parameter_dtype, void* average, DType average_dtype, int64_t count,
          Direction direction) noexcept {
  const base::FloatEnvironment environment;
  if (parameter_dtype == average_dtype) {
    with_dtype(parameter_dtype, [&]<class P>() {
      auto* const bytes = static_cast<std::byte*>(parameter);
      std::swap_ranges(bytes, bytes + static_cast<size_t>(count) * sizeof(P), static_cast<std::byte*>(average));
    });
  } else if (swaps_in_place(parameter_dtype, average_dtype)) {
    auto* const narrow_bits = static_cast<uint16_t*>(parameter);
    auto* const wide_bits = static_cast<uint32_t*>(average);
    for (int64_t i = 0; i < count; ++i) exchange(narrow_bits[i], wide_bits[i], direction);
  }
}

void cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) noexcept {
  const base::FloatEnvironment environment;
  with_dtype(from_dtype, [&]<class From>() {
    with_dtype(to_dtype, [&]<class To>() {
      if constexpr (std::is_same_v<From, To>) {
        if (count > 0) std::memmove(to, from, static_cast<size_t>(count) * sizeof(To));
      } else {
        for (int64_t i = 0; i < count; ++i) static_cast<To*>(to)[i] = convert<To>(static_cast<const From*>(from)[i]);
      }
    });
  });
}

void add_terms(std::span<const Term> terms, DType dtype, bool first, double* sums, int64_t count) noexcept {
  const base::FloatEnvironment environment;
  with_dtype(dtype, [&]<class From>() {
    for (const auto& [data, coefficient] : terms) {
      for (int64_t i = 0; i < count; ++i) {
        const double x = convert<double>(static_cast<const From*>(data)[i]);
        sums[i] = first ? coefficient * x : fused(coefficient, x, sums[i]);
      }
      first = false;
    }
  });
}

double round_sums(const double* sums, void* to, DType to_dtype, int64_t count) noexcept {
  const base::FloatEnvironment environment;
  double largest = 0;
  with_dtype(to_dtype, [&]<class To>() {
    for (int64_t i = 0; i < count; ++i) {
      static_cast<To*>(to)[i] = convert<To>(canonical(sums[i]));
      if (std::isfinite(sums[i])) largest = std::max(largest, std::abs(sums[i]));
    }
  });
  return largest;
}

}  // namespace reference
}  // namespace shardow::kernels
