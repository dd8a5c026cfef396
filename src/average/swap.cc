// Swap, numbered:
//   1. replicas agree that all are there: later failures could leave half of the weights exchanged
//   2. own parts exchange in place; where dtypes forbid it, the weights are kept aside and receive converted averages
//   3. replicas send each other the parts that they own, so that everybody has the whole weights
// The way back is 1, 2 reversed, 3: replicas' weights are equal, so the owner's part restores everybody's.
#include <chrono>

#include "average/checks.h"
#include "average/impl.h"
#include "average/replicas.h"
#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow {

using average::Memory;
using kernels::Direction;

namespace {

TensorView memory_as(const TensorView& view, const Memory& memory) {
  TensorView kept = view;
  kept.data = memory.data();
  return kept;
}

}  // namespace

void Average::swap(size_t k) {
  impl_->swap(impl_->whole, k);
}

void Average::swap(std::span<const TensorView> weights, size_t k) {
  average::check_swappable(impl_->whole, weights);
  impl_->swap(weights, k);
}

bool Average::swapped() const noexcept {
  return impl_->swapped.has_value();
}

void Average::Impl::swap(std::span<const TensorView> weights, size_t k) {
  if (k >= averages.size()) base::fail(Code::kInvalidArgument, "swap({}): there are {} averages", k, averages.size());
  if (swapped && swapped->k != k)
    base::fail(Code::kInvalidArgument, "swap({}): average {} is swapped in; swap it back first", k, swapped->k);
  const Deadline deadline = std::chrono::steady_clock::now() + options.timeout;
  if (options.replicas != nullptr) agree(*options.replicas, deadline, [] {});
  if (swapped) {
    exchange_out(*swapped);
    swapped.reset();
  } else {
    swapped = exchange_in(divide(weights), k);
  }
  if (options.replicas != nullptr) average::exchange_parts(*options.replicas, weights, deadline);
}

Average::Impl::Swapped Average::Impl::exchange_in(std::vector<TensorView> weights, size_t k) {
  std::vector<Memory> kept(weights.size());  // all memory first: past it nothing fails
  for (size_t i = 0; i < weights.size(); ++i) {
    if (kernels::swaps_in_place(weights[i].dtype, options.dtype)) continue;
    kept[i] = Memory(static_cast<size_t>(byte_size(weights[i].dtype, weights[i].region.size())), weights[i].device);
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (kernels::swaps_in_place(weights[i].dtype, options.dtype)) {
      average::swap(weights[i], averages[k][i], Direction::kIn);
    } else {
      average::cast(weights[i], memory_as(weights[i], kept[i]));
      average::cast(averages[k][i], weights[i]);
    }
  }
  return {k, std::move(weights), std::move(kept)};
}

void Average::Impl::exchange_out(const Swapped& in) {
  for (size_t i = 0; i < in.weights.size(); ++i) {
    if (kernels::swaps_in_place(in.weights[i].dtype, options.dtype)) {
      average::swap(in.weights[i], averages[in.k][i], Direction::kOut);
    } else {
      average::cast(memory_as(in.weights[i], in.kept[i]), in.weights[i]);
    }
  }
}

}  // namespace shardow
