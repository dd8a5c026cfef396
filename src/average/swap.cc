// A swap is a transaction whose record, Impl::Swap, is written after each step, so that the way back is a function of
// the record alone:
//   1. memory for all that is kept aside; replicas agree that everybody is here and has it
//   2. own parts exchange in place, one view after the other, on a device as many as a launch takes; where dtypes
//   forbid it, the weights are kept aside and receive converted
//      averages; replicas agree that all of them have
//   3. `shared` is set, and replicas send each other the parts that they own, so that everybody has the whole averages.
//   Nothing of a
//      rank's own can fail here, and a round fails for all: so all of them go on, or all go back
// The way back is 2 reversed, from the last view exchanged, then, where `shared`, 3: replicas' weights are equal, so
// the owner's part restores everybody's. It can be stopped between any two steps too, and is taken up where it stands.
// A failure of 2 or 3 takes it at once.
#include <algorithm>

#include "average/checks.h"
#include "average/impl.h"
#include "average/replicas.h"
#include "average/ring_swap.h"
#include "base/errors.h"
#include "base/turns.h"
#include "group/agree.h"
#include "group/ranks.h"
#include "tensor/dtype.h"

namespace shardow {

using base::fail;
using kernels::Direction;
using kernels::Memory;

namespace {

TensorView memory_as(const TensorView& view, const Memory& memory) {
  TensorView kept = view;
  kept.data = memory.data();
  return kept;
}

void step_done() {
  if (average::swap_seam != nullptr) average::swap_seam();
}

}  // namespace

void Average::swap_in(size_t k) {
  const auto use = impl_->use("swap_in()");
  impl_->swap_in(impl_->whole(), k);
}

void Average::swap_in(std::span<const TensorView> weights, size_t k) {
  const auto use = impl_->use("swap_in()");
  impl_->swap_in(weights, k);
}

void Average::swap_out() {
  const auto use = impl_->use("swap_out()");
  impl_->swap_out();
}

Swapped::~Swapped() {
  try {
    ema_.swap_out();
  } catch (...) {  // the swap is open, which the next call says
  }
}

/// The record says how far the swap came, and so the way back; of replicas, which are not asked, this rank's parts
/// alone.
Average::Impl::~Impl() {
  if (!swap || abandoned) return;
  try {
    exchange_out();
  } catch (...) {  // a device that is lost: nobody is left to be told
  }
}

bool Average::swapped() const noexcept {
  return impl_->swap.has_value();
}

void Average::Impl::swap_in(std::span<const TensorView> weights, size_t k) {
  const Deadline deadline = base::after(options.timeout);
  std::optional<Swap> prepared;
  const auto prepare = [&] {
    if (k >= averages.size()) fail(Code::kInvalidArgument, "swap_in({}): there are {} averages", k, averages.size());
    average::check_swappable(whole(), weights);
    wait();
    if (swap) fail(Code::kInvalidArgument, "swap_in({}): average {} is swapped in; swap it out first", k, swap->k);
    prepared = prepare_swap(weights, k);
  };
  if (options.replicas != nullptr) {
    options.replicas->begin("swap_in()", options.timeout);
    std::optional<group::EqualFacts> facts;
    group::CollectiveCall(*options.replicas, options.timeout).compare([&] {
      prepare();
      return group::Comparisons{&facts.emplace("swap_in()", average::swap_facts(k, counters.updates, weights))};
    });
  } else {
    prepare();
  }
  swap = std::move(prepared);
  try {
    if (options.replicas == nullptr) return exchange_in();
    agree(*options.replicas, deadline, [&] { exchange_in(); });
    swap->shared = true;
    swap->exchange->run(*options.replicas, swap->whole, deadline);
  } catch (...) {
    undo_swap_in();
    throw;
  }
}

/// Where that fails too, the record stays, and swap_out() goes on from it; the first failure is the one to tell.
void Average::Impl::undo_swap_in() noexcept {
  try {
    exchange_out();
    if (swap->shared) swap->exchange->run(*options.replicas, swap->whole, base::after(options.timeout));
    swap.reset();
  } catch (...) {
  }
}

/// All memory that a swap needs.
Average::Impl::Swap Average::Impl::prepare_swap(std::span<const TensorView> weights, size_t k) const {
  Swap prepared{k, {weights.begin(), weights.end()}, divide(weights), std::vector<Memory>(weights.size()), {}};
  if (options.replicas != nullptr) prepared.exchange.emplace(*options.replicas, weights);
  for (size_t i = 0; i < weights.size(); ++i) {
    const TensorView& part = prepared.weights[i];
    if (average::is_other(part) || kernels::swaps_in_place(part.dtype, options.dtype)) continue;
    prepared.kept[i] = Memory(static_cast<size_t>(byte_size(part.dtype, part.region.size())), averages[k][i].device);
    step_done();
  }
  const auto on_ring = [&](size_t i) { return average::is_offloaded(prepared.weights[i], averages[k][i]); };
  for (size_t first = 0, end = 0; first < weights.size(); first = end) {
    const int index = prepared.weights[first].device.index;
    for (end = first + 1;
         on_ring(first) && end < weights.size() && on_ring(end) && prepared.weights[end].device.index == index;)
      ++end;
    if (on_ring(first)) prepared.rings.emplace_back(ring_of(index), prepared.weights, first, end);
  }
  return prepared;
}

average::RingSwap::Tensors Average::Impl::through_ring() const {
  return {swap->weights, averages[swap->k], swap->kept};
}

void Average::Impl::exchange_in() {
  auto ring = swap->rings.begin();
  for (size_t i = 0; i < swap->weights.size(); ++i) {
    step_done();
    if (ring != swap->rings.end() && ring->first() == i) {
      swap->exchanged = ring->end();  // from here on taking back is right: the ring's swap knows how far it came
      ring->in(through_ring(), *pool);
      i = ring++->end() - 1;
      continue;
    }
    const TensorView &weight = swap->weights[i], &average = averages[swap->k][i];
    if (average::is_other(weight)) {
      other_memory->keep(weight);
      swap->exchanged = i + 1;
      other_memory->show(weight, swap->k);
    } else if (kernels::swaps_in_place(weight.dtype, options.dtype)) {
      size_t end = i + 1;
      while (end < swap->weights.size() && end - i < average::kMostSwapped && swap_together(i, end)) ++end;
      exchange(i, end, Direction::kIn);
      swap->exchanged = end;
      i = end - 1;
    } else {
      average::cast(weight, memory_as(weight, swap->kept[i]), *pool);
      swap->exchanged = i + 1;  // from here on taking back is right, whether or not the next line was reached
      average::cast(average, weight, *pool);
    }
  }
  step_done();
}

void Average::Impl::exchange_out() {
  while (swap->exchanged > 0) {
    step_done();
    size_t i = swap->exchanged - 1;
    const auto ring = std::find_if(swap->rings.begin(), swap->rings.end(),
                                   [&](const auto& one) { return one.end() == swap->exchanged; });
    if (ring != swap->rings.end()) {
      ring->out(through_ring(), *pool);
      swap->exchanged = ring->first();
      continue;
    }
    const TensorView& weight = swap->weights[i];
    if (average::is_other(weight)) {
      other_memory->put_back(weight);
    } else if (kernels::swaps_in_place(weight.dtype, options.dtype)) {
      while (i > 0 && swap->exchanged - i < average::kMostSwapped && swap_together(i, i - 1)) --i;
      exchange(i, swap->exchanged, Direction::kOut);
    } else {
      average::cast(memory_as(weight, swap->kept[i]), weight, *pool);
    }
    swap->exchanged = i;
  }
  for (size_t i = 0; i < swap->kept.size(); ++i) {
    if (swap->kept[i].bytes() > 0) average::finish(swap->weights[i]);
  }
  if (other_memory) other_memory->forget();
}

bool Average::Impl::swap_together(size_t i, size_t other) const {
  const auto device_of = [&](size_t at) { return average::swapping_device(swap->weights[at], averages[swap->k][at]); };
  return device_of(i) >= 0 && device_of(i) == device_of(other);
}

void Average::Impl::exchange(size_t first, size_t end, Direction direction) {
  const std::span<const TensorView> weights = swap->weights, averaged = averages[swap->k];
  average::swap(weights.subspan(first, end - first), averaged.subspan(first, end - first), direction, *pool);
}

void Average::Impl::swap_out() {
  const Deadline deadline = base::after(options.timeout);
  bool shared = swap && swap->shared;
  if (options.replicas != nullptr) {
    options.replicas->begin("swap_out()", options.timeout);
    const auto shared_by_any = [](const auto&) { return group::Ranks::Decision{"1"}; };
    // A rank whose own swap failed early is needed by those that went on.
    group::Ranks& replicas = group::ranks_of(*options.replicas);
    shared = !replicas.decide(shared ? "1" : "", shared_by_any, deadline).common.empty();
  }
  if (swap) exchange_out();
  step_done();
  if (shared && options.replicas != nullptr) {
    if (swap) swap->exchange->run(*options.replicas, swap->whole, deadline);
    if (!swap) average::ReplicaExchange(*options.replicas, whole()).run(*options.replicas, whole(), deadline);
  }
  step_done();
  swap.reset();
}

/// `moved` may differ from what was swapped in by its addresses and streams; empty: nothing has moved.
void Average::Impl::take_back(std::span<const TensorView> moved) {
  if (!swap) return;
  if (moved.empty()) return exchange_out();
  std::vector<TensorView> all(moved.begin(), moved.end()), own = divide(moved);
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i].dtype == swap->weights[i].dtype) continue;
    fail(Code::kInvalidArgument, "'{}' is {}; it was {} when the averages were swapped in", own[i].name,
         dtype_name(own[i].dtype), dtype_name(swap->weights[i].dtype));
  }
  swap->whole.swap(all);
  swap->weights.swap(own);
  exchange_out();
}

}  // namespace shardow
