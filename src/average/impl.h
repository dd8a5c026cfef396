// The inside of an Average: four owners, each of its own state.
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

  /// First in each call of the face that reads or writes what another call may write.
  [[nodiscard]] average::ConcurrentUseCheck::Use use(const char* call) const { return {user, call}; }

  [[nodiscard]] average::ConcurrentUseCheck::Look look() const { return average::ConcurrentUseCheck::Look(user); }

  UpdateReport update(std::optional<int64_t> step, double samples, std::span<const Factors> given = {},
                      average::Updater::Launch launch = average::Updater::Launch::kNow);
  void set_stream(int index, void* stream);
  void reset();
  void restart();  ///< reset(), at step 0, with nothing counted or noted; options stay
};

/// The inside of an Average, for faces whose framework moves replicas' memory, frees weights as it likes and looks on
/// without waiting: Python's.
struct average::Inside {
  static Average::Impl& of(const Average& average) noexcept { return *average.impl_; }

  /// Takes views that the caller needs no more, of which a million are 100 MB. `other` works on those that are kOther.
  static Average make(std::vector<TensorView> weights, std::vector<std::vector<TensorView>> averages,
                      AverageOptions options, std::shared_ptr<OtherMemory> other) {
    return {std::move(weights), std::move(averages), std::move(options), std::move(other)};
  }
};

}  // namespace shardow
