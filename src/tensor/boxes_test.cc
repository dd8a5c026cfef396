#include <gtest/gtest.h>

#include "shardow/region.h"
#include "tensor/region_oracle_fixture.h"

namespace shardow::oracle {
namespace {

TEST(RegionBoxes, CoverTheRegionInLocalOrder) {
  Random random(9);
  for (int i = 0; i < 1500; ++i) {
    const Sample sample = random_sample(random, i % 3 != 0);
    SCOPED_TRACE(sample.region.to_string());
    const Shape& shape = sample.region.shape();
    std::vector<int64_t> found;
    for (const Box& box : sample.region.boxes()) {
      EXPECT_EQ(box.local_begin, static_cast<int64_t>(found.size()));
      Dims dims;
      for (size_t d = 0; d < shape.size(); ++d) dims.push_back({{box.offsets[d], box.offsets[d] + box.sizes[d]}});
      const auto inside = oracle::elements(shape, dims);
      EXPECT_FALSE(inside.empty());
      found.insert(found.end(), inside.begin(), inside.end());
    }
    EXPECT_EQ(found, sample.elements);
  }
}

TEST(RegionBoxes, AreFew) {
  Random random(10);
  for (int i = 0; i < 500; ++i) {
    const Shape shape = oracle::random_shape(random, 4, 6);
    Dims dims;
    for (const int64_t size : shape) dims.push_back({{pick(random, 0, size), size}});
    const Region shard = Region::grid(shape, dims);
    EXPECT_EQ(shard.boxes().size(), shard.size() > 0 ? 1u : 0u) << shard.to_string();
    const int64_t begin = pick(random, 0, shard.size());
    const Region window = shard.window(begin, pick(random, begin, shard.size()));
    EXPECT_LE(window.boxes().size(), shape.empty() ? 1 : 2 * shape.size() - 1) << window.to_string();
  }
}

TEST(RegionBoxes, OfSmallRegions) {
  EXPECT_EQ(Region::whole({}).boxes(), (std::vector<Box>{{{}, {}, 0}}));
  EXPECT_EQ(Region::grid({6, 4}, {{{0, 1}, {3, 5}}, {{1, 4}}}).boxes(),
            (std::vector<Box>{{{0, 1}, {1, 3}, 0}, {{3, 1}, {2, 3}, 3}}));
  EXPECT_EQ(Region::whole({4, 5}).window(3, 17).boxes(),
            (std::vector<Box>{{{0, 3}, {1, 2}, 0}, {{1, 0}, {2, 5}, 2}, {{3, 0}, {1, 2}, 12}}));
}

}  // namespace
}  // namespace shardow::oracle
