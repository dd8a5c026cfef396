#include "tensor/coverage.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/errors.h"
#include "shardow/region.h"
#include "tensor/region_oracle_fixture.h"

namespace shardow {
namespace {

using oracle::pick;
using oracle::Random;

/// A mesh as fully_shard and tensor parallelism make them: replicas, strided shards in front of the shards that they
/// interleave with, others.
std::vector<oracle::Placed> random_mesh(Random& random, size_t num_dims) {
  const auto dim = [&] { return static_cast<int>(pick(random, 0, static_cast<int64_t>(num_dims) - 1)); };
  std::vector<oracle::Placed> mesh;
  if (num_dims == 0 || pick(random, 0, 2) == 0) mesh.push_back({pick(random, 1, 3)});
  if (num_dims == 0) return mesh;
  const int64_t kind = pick(random, 0, 2);
  if (kind == 0) {
    for (int64_t i = pick(random, 1, 3); i > 0; --i) mesh.push_back({pick(random, 1, 4), Placement::shard(dim())});
  } else {
    const int shared = dim();
    const int64_t tp = pick(random, 2, 4), ep = kind == 1 ? 1 : pick(random, 2, 3);
    mesh.push_back({pick(random, 1, 4), Placement::shard(shared, tp * ep)});
    if (kind == 2) mesh.push_back({ep, Placement::shard(shared, tp)});
    mesh.push_back({tp, Placement::shard(shared)});
  }
  return mesh;
}

TEST(Coverage, EveryMeshHoldsEveryElementOnce) {
  Random random(5);
  for (int i = 0; i < 600; ++i) {
    const Shape shape = oracle::random_shape(random, 3, 11);
    const auto mesh = random_mesh(random, shape.size());
    std::vector<Region> once, all;
    for (const auto& me : oracle::coordinates(mesh, false)) once.push_back(oracle::sharded(shape, mesh, me));
    for (const auto& me : oracle::coordinates(mesh, true)) all.push_back(oracle::sharded(shape, mesh, me));
    EXPECT_TRUE(covers_once(once));
    EXPECT_TRUE(covers(all));
    if (all.size() > once.size() && all[0].size() > 0) {
      EXPECT_FALSE(covers_once(all));
    }
  }
}

TEST(Coverage, PartsOfShardsHoldEveryElementOnce) {
  Random random(6);
  for (int i = 0; i < 300; ++i) {
    const Shape shape = oracle::random_shape(random, 3, 11);
    const auto mesh = random_mesh(random, shape.size());
    const int count = static_cast<int>(pick(random, 1, 7));
    const int64_t align = pick(random, 1, 16);
    std::vector<Region> parts;
    for (const auto& me : oracle::coordinates(mesh, false)) {
      const Region region = oracle::sharded(shape, mesh, me);
      for (int p = 0; p < count; ++p) parts.push_back(region.part(p, count, align));
    }
    EXPECT_TRUE(covers_once(parts));
  }
}

TEST(Coverage, NamesTheFirstElementThatIsMissingOrDouble) {
  const Region rows = Region::grid({6, 4}, {{{0, 2}}, {{0, 4}}}), left = Region::grid({6, 4}, {{{2, 6}}, {{0, 2}}}),
               right = Region::grid({6, 4}, {{{2, 6}}, {{2, 4}}}), corner = Region::grid({6, 4}, {{{5, 6}}, {{3, 4}}});
  struct Case {
    std::vector<Region> regions;
    int64_t missing, bad;  // -1: none
  };
  const Case cases[] = {
      {{right, rows, left}, -1, -1},
      {{rows, left}, 10, 10},
      {{left, right}, 0, 0},
      {{rows, left, right, corner}, -1, 23},
      {{rows, right.window(0, 7), left}, 23, 23},
      {{rows, rows, left, right}, -1, 0},
      {{Region::whole({6, 4}).window(0, 0)}, 0, 0},
  };
  for (const Case& c : cases) {
    int64_t where = -1;
    EXPECT_EQ(covers(c.regions, &where), c.missing < 0);
    EXPECT_EQ(where, c.missing);
    where = -1;
    EXPECT_EQ(covers_once(c.regions, &where), c.bad < 0);
    EXPECT_EQ(where, c.bad);
  }
}

TEST(Coverage, AgreesWithCounting) {
  Random random(7);
  int num_once = 0;
  for (int i = 0; i < 2000; ++i) {
    const Shape shape = {pick(random, 0, 3), pick(random, 1, 3)};
    std::vector<int> held(static_cast<size_t>(shape[0] * shape[1]));
    std::vector<Region> regions;
    for (int64_t r = pick(random, 1, 4); r > 0; --r) {
      regions.push_back(Region::grid(shape, oracle::random_dims(random, shape)));
      for (const int64_t e : oracle::elements(regions.back())) ++held[static_cast<size_t>(e)];
    }
    const bool all = std::all_of(held.begin(), held.end(), [](int n) { return n > 0; });
    const bool once = std::all_of(held.begin(), held.end(), [](int n) { return n == 1; });
    EXPECT_EQ(covers(regions), all);
    int64_t where = -1;
    EXPECT_EQ(covers_once(regions, &where), once);
    if (!once) {
      EXPECT_NE(held[static_cast<size_t>(where)], 1);
    }
    num_once += once;
  }
  EXPECT_GT(num_once, 20) << "both answers must occur";
}

TEST(Coverage, OfHugeTensorsCountsRunsNotElements) {
  const int64_t side = int64_t{1} << 20;
  const Shape shape = {side, side};
  const std::vector<oracle::Placed> mesh = {{7, Placement::shard(0, 3)}, {3, Placement::shard(0)}};
  std::vector<Region> regions;
  for (const auto& me : oracle::coordinates(mesh, false)) regions.push_back(oracle::sharded(shape, mesh, me));
  EXPECT_TRUE(covers_once(regions));
  regions.back() = regions.back().window(1, regions.back().size());
  int64_t where = -1;
  EXPECT_FALSE(covers_once(regions, &where));
  EXPECT_GT(where, 0);
  EXPECT_TRUE(covers_once({Region::whole({kMax}).window(0, kMax - 1), Region::whole({kMax}).window(kMax - 1, kMax)}));
}

TEST(Coverage, RefusesRegionsOfDifferentTensors) {
  try {
    covers({Region::whole({2}), Region::whole({3})});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_STREQ(error.what(), "regions [2] and [3] are of different tensors");
  }
  EXPECT_THROW(covers_once({}), Error);
}

}  // namespace
}  // namespace shardow
