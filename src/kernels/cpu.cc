// Dispatch: this file is compiled once per instruction set, and the best that the processor has is taken at run time.
// Where an instruction set lacks a fused multiply-add, the reference does the work, so that the bits are the same
// everywhere.
#include <cstring>

#include "base/float_environment.h"
#include "kernels/kernels.h"
#include "kernels/row.h"
#include "kernels/sums.h"
#include "tensor/dtype.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/move-inl.h"
#include "kernels/sum-inl.h"
#include "kernels/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace shardow::kernels::HWY_NAMESPACE {

#if SHARDOW_VECTORS

constexpr size_t kAhead = 2;            // chunks
constexpr size_t kFetchedBytes = 8192;  // of each operand of a chunk
constexpr size_t kLine = 64;
constexpr int64_t kLargeElements = 16 * 1024;

void fetch(const void* memory, size_t bytes) {
  for (size_t i = 0; i < HWY_MIN(bytes, kFetchedBytes); i += kLine)
    hwy::Prefetch(static_cast<const std::byte*>(memory) + i);
}

/// A small chunk on its way while others are computed: small tensors lie anywhere, and each would be waited for. Of a
/// large one the processor sees the stream by itself.
void fetch(const Chunk& chunk, int num_averages) {
  if (chunk.count >= kLargeElements) return;
  fetch(chunk.parameter, static_cast<size_t>(byte_size(chunk.parameter_dtype, chunk.count)));
  for (size_t k = 0; k < static_cast<size_t>(num_averages); ++k) {
    fetch(chunk.averages[k], static_cast<size_t>(byte_size(chunk.average_dtype, chunk.count)));
  }
}

template <class P, class S>
int64_t update_as(const Chunk& chunk, const Step& step) {
  return update_row(Row<P, S>(chunk, step));
}

/// The update of a chunk of these dtypes, a function that takes its arguments in registers: a lambda per chunk would
/// read what it captures from memory, which costs a small chunk a tenth of its time.
auto update_for(DType parameter_dtype, DType average_dtype) {
  decltype(&update_as<float, float>) chosen = nullptr;
  with_dtype(parameter_dtype,
             [&]<class P>() { with_dtype(average_dtype, [&]<class S>() { chosen = &update_as<P, S>; }); });
  return chosen;
}

Tally update(std::span<const Chunk> chunks, const Step& step) {
  Tally tally;
  for (size_t c = 0; c < chunks.size(); ++c) {
    if (c + kAhead < chunks.size()) fetch(chunks[c + kAhead], step.num_averages);
    add(tally, update_for(chunks[c].parameter_dtype, chunks[c].average_dtype)(chunks[c], step), c);
  }
  return tally;
}

void swap(void* parameter, DType parameter_dtype, void* average, DType average_dtype, int64_t count,
          Direction direction) {
  if (parameter_dtype == average_dtype) {
    with_dtype(parameter_dtype, [&]<class P>() {
      swap_words(static_cast<uint16_t*>(parameter), static_cast<uint16_t*>(average),
                 static_cast<size_t>(count) * (sizeof(P) / 2));
    });
  } else if (swaps_in_place(parameter_dtype, average_dtype)) {
    exchange_all(static_cast<uint16_t*>(parameter), static_cast<uint32_t*>(average), static_cast<size_t>(count),
                 direction);
  }
}

void cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) {
  with_dtype(from_dtype, [&]<class From>() {
    with_dtype(to_dtype, [&]<class To>() {
      if constexpr (std::is_same_v<From, To>) {
        if (count > 0) std::memmove(to, from, static_cast<size_t>(count) * sizeof(To));
      } else {
        cast_all(static_cast<const From*>(from), static_cast<To*>(to), static_cast<size_t>(count));
      }
    });
  });
}

void add_terms(std::span<const Term> terms, DType dtype, bool first, double* sums, int64_t count) {
  with_dtype(dtype, [&]<class From>() {
    const auto add = first ? add_all<From, true> : add_all<From, false>;
    add(terms, sums, static_cast<size_t>(count));
  });
}

double round_sums(const double* sums, void* to, DType to_dtype, int64_t count) {
  double largest = 0;
  with_dtype(to_dtype,
             [&]<class To>() { largest = round_all(sums, static_cast<To*>(to), static_cast<size_t>(count)); });
  return largest;
}

const char* target() {
  return hwy::TargetName(HWY_TARGET);
}

#else

Tally update(std::span<const Chunk> chunks, const Step& step) {
  return reference::update(chunks, step);
}
void swap(void* parameter, DType parameter_dtype, void* average, DType average_dtype, int64_t count,
          Direction direction) {
  reference::swap(parameter, parameter_dtype, average, average_dtype, count, direction);
}
void cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) {
  reference::cast(from, from_dtype, to, to_dtype, count);
}
void add_terms(std::span<const Term> terms, DType dtype, bool first, double* sums, int64_t count) {
  reference::add_terms(terms, dtype, first, sums, count);
}
double round_sums(const double* sums, void* to, DType to_dtype, int64_t count) {
  return reference::round_sums(sums, to, to_dtype, count);
}
const char* target() {
  return "reference";
}

#endif

}  // namespace shardow::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace shardow::kernels {

HWY_EXPORT(update);
HWY_EXPORT(swap);
HWY_EXPORT(cast);
HWY_EXPORT(add_terms);
HWY_EXPORT(round_sums);
HWY_EXPORT(target);

Tally cpu::update(std::span<const Chunk> chunks, const Step& step) noexcept {
  const base::FloatEnvironment environment;
  return HWY_DYNAMIC_DISPATCH(update)(chunks, step);
}

void cpu::swap(void* parameter, DType parameter_dtype, void* average, DType average_dtype, int64_t count,
               Direction direction) noexcept {
  const base::FloatEnvironment environment;
  HWY_DYNAMIC_DISPATCH(swap)(parameter, parameter_dtype, average, average_dtype, count, direction);
}

void cpu::cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) noexcept {
  const base::FloatEnvironment environment;
  HWY_DYNAMIC_DISPATCH(cast)(from, from_dtype, to, to_dtype, count);
}

void cpu::add_terms(std::span<const Term> terms, DType dtype, bool first, double* sums, int64_t count) noexcept {
  const base::FloatEnvironment environment;
  HWY_DYNAMIC_DISPATCH(add_terms)(terms, dtype, first, sums, count);
}

double cpu::round_sums(const double* sums, void* to, DType to_dtype, int64_t count) noexcept {
  const base::FloatEnvironment environment;
  return HWY_DYNAMIC_DISPATCH(round_sums)(sums, to, to_dtype, count);
}

const char* cpu::target() noexcept {
  return HWY_DYNAMIC_DISPATCH(target)();
}

}  // namespace shardow::kernels
#endif  // HWY_ONCE
