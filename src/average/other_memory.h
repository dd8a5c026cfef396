// OtherMemory: weights and averages on devices for which the engine has no kernels. Their owner does the work.
#pragma once

#include <memory>
#include <span>

#include "average/backend.h"
#include "shardow/average.h"

namespace shardow::average {

/// The kind of device of such views.
inline constexpr auto kOther = static_cast<Device::Kind>(2);

inline bool is_other(const TensorView& view) {
  return view.device.kind == kOther;
}

/// Finds its memory by the views' names. A call that throws in a swap may be repeated.
class OtherMemory {
 public:
  virtual ~OtherMemory() = default;
  virtual std::unique_ptr<Backend> bind(std::span<const TensorView> parameters) = 0;

  // A swap: weights are kept aside, receive an average, and come back.
  virtual void keep(const TensorView& weights) = 0;
  virtual void show(const TensorView& weights, size_t k) = 0;
  virtual void put_back(const TensorView& weights) = 0;
  virtual void forget() = 0;  ///< drops the kept weights, which are all back
};

}  // namespace shardow::average
