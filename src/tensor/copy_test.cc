#include "shardow/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/errors.h"
#include "tensor/region_oracle_fixture.h"

namespace shardow {
namespace {

using oracle::pick;
using oracle::Random;
using oracle::random_sample;
using oracle::Sample;

/// A tensor that lies in its memory in any order of dimensions, some of them backwards, with gaps.
struct Lying {
  Shape strides;
  int64_t first = 0, size = 1;  // of the memory, in elements

  Lying(Random& random, const Shape& shape) : strides(shape.size()) {
    std::vector<size_t> order(shape.size());
    std::iota(order.begin(), order.end(), size_t{0});
    if (pick(random, 0, 2) > 0) std::shuffle(order.begin(), order.end(), random);
    for (size_t i = order.size(); i-- > 0;) {
      const size_t d = order[i];
      const bool backwards = pick(random, 0, 4) == 0;
      strides[d] = backwards ? -size : size;
      if (backwards) first += size * std::max<int64_t>(shape[d] - 1, 0);
      size = size * std::max<int64_t>(shape[d], 1) + (pick(random, 0, 3) == 0 ? 1 : 0);
    }
  }

  /// Where element `global` of the row-major numbering lies.
  size_t place_of(int64_t global, const Shape& shape) const {
    int64_t at = first;
    for (size_t d = shape.size(); d-- > 0; global /= shape[d]) at += global % shape[d] * strides[d];
    return static_cast<size_t>(at);
  }
};

template <typename T>
void check_both_ways(DType dtype, uint64_t seed) {
  Random random(seed);
  for (int i = 0; i < 700; ++i) {
    const Sample sample = random_sample(random, i % 3 != 0);
    const Shape& shape = sample.region.shape();
    const Lying lying(random, shape);
    std::vector<T> memory(static_cast<size_t>(lying.size)), local(sample.elements.size(), T{99}), expected;
    for (T& value : memory) value = static_cast<T>(pick(random, 1, 90));
    for (const int64_t global : sample.elements) expected.push_back(memory[lying.place_of(global, shape)]);
    const StridedView tensor{memory.data() + lying.first, dtype, lying.strides};
    const TensorView part{"p", dtype, sample.region, local.data()};

    take(tensor, part);
    ASSERT_EQ(local, expected) << sample.region.to_string() << ", case " << i;

    std::vector<T> changed = memory;
    for (size_t n = 0; n < local.size(); ++n)
      changed[lying.place_of(sample.elements[n], shape)] = local[n] = static_cast<T>(100 + n % 20);
    place(part, tensor);
    ASSERT_EQ(memory, changed) << sample.region.to_string() << ", case " << i;
  }
}

TEST(Copy, TakesAndPlacesEveryElementAndNoOther) {
  check_both_ways<uint8_t>(DType::kU8, 41);
  check_both_ways<uint16_t>(DType::kBF16, 42);
  check_both_ways<float>(DType::kF32, 43);
  check_both_ways<double>(DType::kF64, 44);
}

TEST(Copy, OfChannelsLastWeights) {
  std::vector<float> memory(2 * 3 * 2 * 2), flat(memory.size());
  std::iota(memory.begin(), memory.end(), 0.0f);
  take({memory.data(), DType::kF32, {12, 1, 6, 3}}, {"w", DType::kF32, Region::whole({2, 3, 2, 2}), flat.data()});
  EXPECT_EQ(std::vector<float>(flat.begin(), flat.begin() + 6), (std::vector<float>{0, 3, 6, 9, 1, 4}));
}

TEST(Copy, RefusesWhatItCannotCopy) {
  float one[4] = {}, other[4] = {5, 5, 5, 5};
  const TensorView part{"w", DType::kF32, Region::whole({2, 2}), one};
  TensorView device = part, packed = part;
  device.device.kind = Device::Kind::kCuda;
  packed.dtype = DType::kF4;
  const auto code_of = [](auto&& fn) {
    try {
      fn();
    } catch (const Error& error) {
      return error.code();
    }
    return Code::kInternal;
  };
  const auto refused = [&](const StridedView& tensor, const TensorView& of, Code code) {
    EXPECT_EQ(code_of([&] { take(tensor, of); }), code);
    EXPECT_EQ(code_of([&] { place(of, tensor); }), code);
  };
  refused({other, DType::kF32, {1}}, part, Code::kInvalidArgument);
  refused({other, DType::kBF16, {2, 1}}, part, Code::kInvalidArgument);
  refused({other, DType::kF32, {2, 1}}, device, Code::kUnsupported);
  refused({other, DType::kF4, {2, 1}}, packed, Code::kUnsupported);
  const StridedView expanded{other, DType::kF32, {0, 1}};
  EXPECT_EQ(code_of([&] { place(part, expanded); }), Code::kInvalidArgument);
  EXPECT_EQ(other[0], 5);
  take(expanded, part);
  EXPECT_EQ(one[2], 5);
}

}  // namespace
}  // namespace shardow
