#include "tensor/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>

#include "tensor/region_oracle.h"

namespace shardow {
namespace {

using oracle::pick;
using oracle::Random;

TEST(Overlap, IsWhatBothHold) {
  Random random(8);
  for (int i = 0; i < 1000; ++i) {
    const Shape shape = oracle::random_shape(random, 3, 7);
    const auto draw = [&] {
      const Region grid = Region::grid(shape, oracle::random_dims(random, shape));
      return grid.window(pick(random, 0, grid.size()), grid.size());
    };
    const Region a = draw(), b = draw();
    const auto in_a = oracle::elements(a), in_b = oracle::elements(b);
    std::vector<int64_t> common, found;
    std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(), std::back_inserter(common));
    int64_t pieces = 0;
    for_each_overlap(a, b, [&](int64_t global, int64_t a_local, int64_t b_local, int64_t length) {
      ++pieces;
      for (int64_t k = 0; k < length; ++k) {
        EXPECT_EQ(in_a[static_cast<size_t>(a_local + k)], global + k);
        EXPECT_EQ(in_b[static_cast<size_t>(b_local + k)], global + k);
        found.push_back(global + k);
      }
    });
    EXPECT_EQ(found, common);
    EXPECT_LE(pieces, std::max<int64_t>(0, a.num_runs() + b.num_runs() - 1) + (a.size() == 0 || b.size() == 0));
  }
}

TEST(Overlap, RefusesRegionsOfDifferentTensors) {
  EXPECT_THROW(for_each_overlap(Region::whole({2}), Region::whole({3}), [](int64_t, int64_t, int64_t, int64_t) {}),
               Error);
}

}  // namespace
}  // namespace shardow
