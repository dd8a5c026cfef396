// Helpers of tests of Average: tensors that own their memory, the reference recursion, the error of a call.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "shardow/average.h"
#include "shardow/error.h"
#include "shardow/group.h"

namespace shardow {

inline constexpr int64_t kRows = 37, kColumns = 11;

/// A float32 tensor and the memory of the elements that its region holds.
struct OwnTensor {
  std::vector<float> values;
  TensorView view;

  OwnTensor(std::string name, Shape shape, uint32_t seed)
      : OwnTensor(std::move(name), Region::whole(std::move(shape)), seed) {}
  OwnTensor(std::string name, const Region& region, uint32_t seed)
      : values(static_cast<size_t>(region.size())), view{std::move(name), DType::kF32, region, nullptr} {
    fill(seed);
    view.data = values.data();
  }

  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(random);
  }
};

inline std::vector<float> copy_of(const TensorView& view) {
  const auto* data = static_cast<const float*>(view.data);
  return {data, data + view.region.size()};
}

/// Applies the lerp rule, one element at a time.
inline void lerp(std::vector<float>& average, const std::vector<float>& parameter, double weight) {
  const auto w = static_cast<float>(weight);
  for (size_t i = 0; i < average.size(); ++i) {
    const float p = parameter[i], e = average[i];
    average[i] = w < 0.5f ? std::fmaf(w, p - e, e) : std::fmaf(w - 1, p - e, p);
  }
}

inline AverageOptions with_decay(double decay) {
  return {.schedules = {Schedule::constant(decay)}};
}

template <typename Fn>
std::string message_of(Fn&& fn, Code code) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

/// A column shard, so that rounding by elements has jumps.
inline Region columns() {
  return Region::grid({kRows, kColumns}, {{{0, kRows}}, {{2, 7}}});
}

}  // namespace shardow
