// update-inl.h's walk without its arithmetic, tests and formulas.
#include "roofline.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "roofline.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/row.h"
#include "kernels/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace shardow::kernels::HWY_NAMESPACE {

#if SHARDOW_VECTORS

template <int kVectors, class P, class S, class A>
HWY_INLINE void limit_block(const Chunk& chunk, int num_averages, A access, int64_t begin) {
  const hn::ScalableTag<S> d;
  hn::Vec<decltype(d)> p[kVectors], e[kVectors];
  for (int j = 0; j < kVectors; ++j)
    p[j] = load(d, access, static_cast<const P*>(chunk.parameter) + begin + static_cast<size_t>(j) * hn::Lanes(d));
  for (int k = 0; k < num_averages; ++k) {
    S* const to = static_cast<S*>(chunk.averages[static_cast<size_t>(k)]) + begin;
    for (int j = 0; j < kVectors; ++j) e[j] = load(d, access, to + static_cast<size_t>(j) * hn::Lanes(d));
    for (int j = 0; j < kVectors; ++j)
      store(d, access, hn::Max(p[j], e[j]), to + static_cast<size_t>(j) * hn::Lanes(d));
  }
}

template <class P, class S>
HWY_NOINLINE void limit_row(const Chunk& chunk, int num_averages) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<S>()));
  constexpr int kUnroll = 4;
  const uintptr_t address = reinterpret_cast<uintptr_t>(chunk.averages[0]);
  int64_t i = static_cast<int64_t>((~address + 1) % (static_cast<size_t>(lanes) * sizeof(S)) / sizeof(S));
  i = HWY_MIN(i, chunk.count);
  if (i > 0) limit_block<1, P, S>(chunk, num_averages, First{static_cast<size_t>(i)}, 0);
  for (; i + kUnroll * lanes <= chunk.count; i += kUnroll * lanes)
    limit_block<kUnroll, P, S>(chunk, num_averages, Whole{}, i);
  for (; i + lanes <= chunk.count; i += lanes) limit_block<1, P, S>(chunk, num_averages, Whole{}, i);
  if (i < chunk.count) limit_block<1, P, S>(chunk, num_averages, First{static_cast<size_t>(chunk.count - i)}, i);
}

template <class P>
void limit_parameter(const Chunk& chunk, int num_averages) {
  if (chunk.average_dtype == DType::kF32) limit_row<P, float>(chunk, num_averages);
  if (chunk.average_dtype == DType::kF64) limit_row<P, double>(chunk, num_averages);
}

void limit(std::span<const Chunk> chunks, int num_averages) {
  for (const Chunk& chunk : chunks) {
    with_dtype(chunk.parameter_dtype, [&]<class P>() { limit_parameter<P>(chunk, num_averages); });
  }
}

#else

void limit(std::span<const Chunk> chunks, int num_averages) {
  for (const Chunk& chunk : chunks) {
    if (chunk.parameter_dtype != DType::kF32 || chunk.average_dtype != DType::kF32) continue;
    for (int64_t i = 0; i < chunk.count; ++i) {
      const float p = static_cast<const float*>(chunk.parameter)[i];
      for (int k = 0; k < num_averages; ++k) {
        float& e = static_cast<float*>(chunk.averages[static_cast<size_t>(k)])[i];
        e = e > p ? e : p;
      }
    }
  }
}

#endif

}  // namespace shardow::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace shardow::kernels {

HWY_EXPORT(limit);

void roofline::update(std::span<const Chunk> chunks, int num_averages) noexcept {
  HWY_DYNAMIC_DISPATCH(limit)(chunks, num_averages);
}

}  // namespace shardow::kernels
#endif  // HWY_ONCE
