#include "tensor/likeness.h"

#include <gtest/gtest.h>

#include <functional>

namespace shardow {
namespace {

/// Names around the words by which they are compared; regions whose keys lie in place, and longer ones.
std::vector<TensorView> views() {
  static float memory[32] = {};
  std::vector<TensorView> all;
  for (const char* name :
       {"", "w", "weight", "weight.7", "weights.8", "weights.of.ten.8", "model.blocks.0.attention.projection.weight"}) {
    const auto more = std::vector<Interval>{{0, 1}, {3, 4}, {6, 7}, {9, 10}};
    all.push_back({name, DType::kF32, Region::grid({8, 4}, {{{2, 4}}, {{0, 4}}}).window(1, 3), memory});
    all.push_back({std::string(name) + "?", DType::kF32, Region::grid({10, 4}, {more, {{0, 2}}}), memory + 8});
    all.push_back({std::string(name) + "!", DType::kF32, Region::whole({}), memory + 16});
  }
  return all;
}

TEST(Likeness, HoldsTheSameViewsAndThoseMadeAnew) {
  const std::vector<TensorView> made = views();
  EXPECT_TRUE(Likeness(made).holds(made));
  EXPECT_TRUE(Likeness(made).holds(views()));
  EXPECT_TRUE(Likeness().holds({}));
  EXPECT_FALSE(Likeness().holds(made));
  EXPECT_FALSE(Likeness(made).holds(std::span(made).first(made.size() - 1)));
}

TEST(Likeness, SeesEveryDifference) {
  const std::vector<TensorView> made = views();
  const Likeness like(made);
  const std::vector<std::function<void(TensorView&)>> changes = {
      [](TensorView& view) { view.data = static_cast<float*>(view.data) + 1; },
      [](TensorView& view) { view.dtype = DType::kBF16; },
      [](TensorView& view) { view.device.kind = Device::Kind::kCuda; },
      [](TensorView& view) { view.device.index = 1; },
      [](TensorView& view) { view.name += 'x'; },
      [](TensorView& view) { view.region = Region::whole({3}); },
      [](TensorView& view) { view.region = view.region.window(0, view.region.size() - 1); },
      [](TensorView& view) {
        view.region = Region::grid({8, 4}, {{{2, 4}}, {{0, 4}}}).window(2, 4);
      },
      [](TensorView& view) {
        view.region = Region::grid({8, 4}, {{{2, 5}}, {{0, 4}}}).window(1, 3);
      },
      [](TensorView& view) {
        view.region = Region::grid({8, 5}, {{{2, 4}}, {{0, 4}}}).window(1, 3);
      },
      [](TensorView& view) {
        view.region = Region::grid({10, 4}, {{{0, 1}, {3, 4}, {6, 7}, {8, 9}}, {{0, 2}}});
      },
      [](TensorView& view) {
        view.region = Region::grid({10, 4}, {{{0, 1}, {3, 4}, {6, 7}, {9, 10}}, {{1, 3}}});
      },
  };
  for (size_t i = 0; i < made.size(); ++i) {
    for (size_t c = 0; c < changes.size(); ++c) {
      std::vector<TensorView> other = views();
      changes[c](other[i]);
      EXPECT_FALSE(like.holds(other)) << i << ", " << c;
    }
    for (size_t at = 0; at < made[i].name.size(); ++at) {
      std::vector<TensorView> other = views();
      other[i].name[at] ^= 1;
      EXPECT_FALSE(like.holds(other)) << i << ", " << at;
    }
  }
}

TEST(Likeness, SaysWhetherAllIsOnTheHost) {
  std::vector<TensorView> some = views();
  EXPECT_TRUE(Likeness(some).on_host());
  some[3].device.kind = Device::Kind::kCuda;
  EXPECT_FALSE(Likeness(some).on_host());
}

}  // namespace
}  // namespace shardow
