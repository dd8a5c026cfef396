// A chunk made ready for the body of one (parameter dtype, average dtype) pair: formulas resolved, noise keys drawn.
// The bodies are templates on the storage types; with_dtype() is the one place where a DType becomes a type.
// update_elements() is the scalar body: all of the reference, and what the vector kernels do with a block that holds a
// parameter that is not finite.
#pragma once

#include <cstdint>

#include "kernels/arithmetic.h"
#include "kernels/kernels.h"

namespace shardow::kernels {

template <class P, class S>
struct Row {
  using T = Computing<S>;

  Row(const Chunk& chunk, const Step& step)
      : parameter(static_cast<const P*>(chunk.parameter)),
        count(chunk.count),
        low(static_cast<uint32_t>(chunk.global_begin)),
        num_averages(step.num_averages),
        hold(step.hold) {
    for (int k = 0; k < num_averages; ++k) {
      averages[k] = static_cast<S*>(chunk.averages[static_cast<size_t>(k)]);
      formulas[k] = resolve<S>(step.averages[static_cast<size_t>(k)]);
      if (draws(formulas[k].op))
        keys[k] = noise_key(step.seed, step.step, chunk.tensor, k, static_cast<uint32_t>(chunk.global_begin >> 32));
    }
  }

  const P* parameter;
  int64_t count;
  uint32_t low;  ///< of the first element's global index
  int num_averages;
  bool hold;
  S* averages[kMaxAverages];
  Formula<T> formulas[kMaxAverages];
  NoiseKey keys[kMaxAverages];
};

/// Elements [begin, end) of the row, one by one. Returns how many parameters were not finite.
template <class P, class S>
inline int64_t update_elements(const Row<P, S>& row, int64_t begin, int64_t end) {
  int64_t non_finite = 0;
  for (int64_t i = begin; i < end; ++i) {
    const auto p = convert<Computing<S>>(row.parameter[i]);
    if (!is_finite(p)) {
      ++non_finite;
      if (row.hold) continue;
    }
    for (int k = 0; k < row.num_averages; ++k) {
      const uint32_t noise =
          draws(row.formulas[k].op) ? noise_bits(row.keys[k], row.low + static_cast<uint32_t>(i)) : 0;
      row.averages[k][i] = next<S>(row.formulas[k], p, row.averages[k][i], noise);
    }
  }
  return non_finite;
}

/// Calls visit.template operator()<Type>() with the storage type of one of the four floating dtypes; for any other,
/// nothing happens.
template <class Visit>
inline void with_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kF32: return visit.template operator()<float>();
    case DType::kBF16: return visit.template operator()<BF16>();
    case DType::kF16: return visit.template operator()<F16>();
    case DType::kF64: return visit.template operator()<double>();
    default: return;
  }
}

inline void add(Tally& tally, int64_t non_finite, size_t chunk) {
  if (non_finite > 0 && tally.first_chunk < 0) tally.first_chunk = static_cast<int64_t>(chunk);
  tally.non_finite += non_finite;
}

}  // namespace shardow::kernels
