#include "average/driver.h"

#include <utility>

#include "average/checks.h"
#include "average/impl.h"
#include "base/errors.h"

namespace shardow::average {

using base::fail;

SwapState Driver::swap_state(const Average& ema) noexcept {
  const auto& swap = ema.impl_->swap;
  return swap ? SwapState{swap->exchanged, swap->shared} : SwapState{};
}

Average Driver::make(std::vector<TensorView> weights, std::vector<std::vector<TensorView>> averages,
                     AverageOptions options, std::shared_ptr<OtherMemory> other) {
  return {std::move(weights), std::move(averages), std::move(options), std::move(other)};
}

void Driver::share(Average& ema) {
  const auto use = ema.impl_->use("share()");
  if (!ema.impl_->swap) fail(Code::kInvalidArgument, "share() where nothing is swapped in");
  ema.impl_->swap->shared = true;
}

void Driver::take_back(Average& ema, std::span<const TensorView> weights) {
  const auto use = ema.impl_->use("take_back()");
  if (!weights.empty()) check_swappable(ema.impl_->whole(), weights);
  ema.impl_->take_back(weights);
}

void Driver::settle(Average& ema) {
  const auto use = ema.impl_->use("settle()");
  auto& swap = ema.impl_->swap;
  if (swap && swap->exchanged > 0)
    fail(Code::kInternal, "settle() while {} views hold averages; take_back() comes first", swap->exchanged);
  swap.reset();
}

void Driver::abandon_swap(Average& ema) noexcept {
  ema.impl_->abandoned = true;
}

void Driver::restart(Average& ema) {
  const auto use = ema.impl_->use("restart()");
  ema.reset();
  ema.impl_->read_counts();
  ema.impl_->counters = {};
  ema.impl_->met.reset();
}

Counters Driver::counters(const Average& ema) noexcept {
  const auto look = ema.impl_->look();
  return ema.impl_->counters;
}

double Driver::samples_by(const Average& ema, double batch) noexcept {
  const Counters& now = ema.impl_->counters;
  return now.applied_samples + batch * static_cast<double>(now.step + 1 - now.applied_step);
}

}  // namespace shardow::average
