// The implementation of Average: clock, storage, updater and swap, each of which owns its state.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "average/clock.h"
#include "average/concurrent_use_check.h"
#include "average/storage.h"
#include "average/swap.h"
#include "average/updater.h"
#include "shardow/average.h"

namespace shardow {

struct Average::Impl {
  Impl(std::vector<TensorView> parameters, AverageOptions chosen, std::shared_ptr<average::OtherMemory> others);

  mutable average::ConcurrentUseCheck user;
  average::Clock clock;
  average::Storage storage;
  average::Updater updater;
  average::Swap swap;

  /// Begins each public call that reads or writes what another call may write.
  [[nodiscard]] average::ConcurrentUseCheck::Use use(const char* call) const { return {user, call}; }

  [[nodiscard]] average::ConcurrentUseCheck::Look look() const { return average::ConcurrentUseCheck::Look(user); }

  UpdateReport update(std::optional<int64_t> step, double samples, std::span<const Factors> factors = {},
                      average::Updater::Launch launch = average::Updater::Launch::kNow);
  void set_stream(int index, void* stream);
  void reset();
  void restart();  ///< reset(), at step 0, with nothing counted or noted; options stay
};

/// Gives access to the implementation. Python needs it: its framework moves replicas' memory, frees weights as it
/// likes, and reads figures without waiting.
struct average::Inside {
  static Average::Impl& of(const Average& average) noexcept { return *average.impl_; }

  /// Makes an Average of views that the caller needs no more: a million are 100 MB. `other` works on those that are
  /// kOther.
  static Average make(std::vector<TensorView> weights, std::vector<std::vector<TensorView>> averages,
                      AverageOptions options, std::shared_ptr<OtherMemory> other) {
    return {std::move(weights), std::move(averages), std::move(options), std::move(other)};
  }
};

}  // namespace shardow
