#include "shardow/region.h"

#include <gtest/gtest.h>

#include <string>

#include "base/errors.h"
#include "tensor/coverage.h"
#include "tensor/region_oracle_fixture.h"

namespace shardow::oracle {
namespace {

template <typename Fn>
std::string refusal_of(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

TEST(RegionGrid, EmptyAndTouchingIntervalsAreNormalised) {
  const Region one = Region::grid({8}, {{{0, 2}, {2, 2}, {2, 5}, {7, 7}}});
  EXPECT_EQ(one.to_string(), "[8] at [0:5]");
  EXPECT_EQ(one.encode(), Region::grid({8}, {{{0, 5}}}).encode());
}

TEST(RegionGrid, RefusesWhatIsNoGrid) {
  struct Case {
    Shape shape;
    Dims dims;
    const char* message;
  };
  const Case cases[] = {
      {{8}, {{{3, 9}}}, "interval [3, 9) of dimension 0 is not inside its 8 indices"},
      {{2, 8}, {{{0, 2}}, {{-1, 2}}}, "interval [-1, 2) of dimension 1 is not inside its 8 indices"},
      {{8}, {{{3, 2}}}, "interval [3, 2) of dimension 0 is not inside its 8 indices"},
      {{8}, {{{0, 3}, {2, 5}}}, "interval [2, 5) of dimension 0 begins before 3, where the last one ends"},
      {{8}, {{{4, 5}, {0, 3}}}, "interval [0, 3) of dimension 0 begins before 5, where the last one ends"},
      {{8}, {{{5, 5}, {0, 3}}}, "interval [0, 3) of dimension 0 begins before 5, where the last one ends"},
      {{8}, {}, "intervals for 0 dimensions of a tensor that has 1"},
      {{-1}, {{}}, "shape [-1] has a negative size"},
      {{kMax, 2}, {{}, {}}, "shape [9223372036854775807, 2] has more elements than fit in 64 bits"},
  };
  for (const Case& c : cases) EXPECT_EQ(refusal_of([&] { Region::grid(c.shape, c.dims); }), c.message);
  EXPECT_EQ(refusal_of([] { Region::whole(Shape(65, 1)); }), "a tensor of 65 dimensions; at most 64 are supported");
  EXPECT_EQ(Region::whole(Shape(64, 1)).size(), 1);
}

TEST(RegionWindow, CountsFromTheOuterWindow) {
  Random random(2);
  for (int i = 0; i < 300; ++i) {
    const Sample sample = random_sample(random, true);
    const int64_t n = sample.region.size(), begin = pick(random, 0, n), end = pick(random, begin, n);
    const std::vector<int64_t> inner(sample.elements.begin() + begin, sample.elements.begin() + end);
    EXPECT_EQ(oracle::elements(sample.region.window(begin, end)), inner) << sample.region.to_string();
  }
}

TEST(RegionWindow, RefusesElementsOutside) {
  const Region region = Region::whole({10}).window(2, 8);
  for (const auto& [begin, end] : {std::pair{-1, 2}, {0, 7}, {3, 2}, {7, 7}})
    EXPECT_THROW(region.window(begin, end), Error);
  EXPECT_EQ(region.window(6, 6).size(), 0);
}

TEST(RegionPart, CoversInOrderInNearEqualAlignedParts) {
  Random random(3);
  for (int i = 0; i < 500; ++i) {
    const Sample sample = random_sample(random, i % 2 == 1);
    const int count = static_cast<int>(pick(random, 1, 7));
    const int64_t align = pick(random, 1, 20);
    std::vector<int64_t> joined;
    int64_t least = kMax, most = 0;
    for (int p = 0; p < count; ++p) {
      const Region part = sample.region.part(p, count, align);
      EXPECT_TRUE(joined.size() % static_cast<size_t>(align) == 0 || part.size() == 0);
      const auto found = oracle::elements(part);
      joined.insert(joined.end(), found.begin(), found.end());
      least = std::min(least, part.size());
      most = std::max(most, part.size());
    }
    EXPECT_EQ(joined, sample.elements);
    EXPECT_LT(most - least, 2 * align);
  }
}

TEST(RegionPart, OfTheLargestTensorDoesNotWrap) {
  for (const int64_t align : {int64_t{1}, int64_t{16}, kMax - 1, kMax}) {
    std::vector<Region> parts;
    for (int p = 0; p < 7; ++p) parts.push_back(Region::whole({kMax}).part(p, 7, align));
    EXPECT_TRUE(covers_once(parts)) << align;
  }
}

TEST(RegionPart, RefusesAnIndexOutsideTheCount) {
  const Region region = Region::whole({10});
  for (const auto& [index, count] : {std::pair{-1, 2}, {2, 2}, {0, 0}}) EXPECT_THROW(region.part(index, count), Error);
  EXPECT_THROW(region.part(0, 1, 0), Error);
}

TEST(RegionPosition, CountsTheElementsBefore) {
  Random random(5);
  for (int i = 0; i < 3000; ++i) {
    const Sample sample = random_sample(random, i % 2 == 1);
    int64_t size = 1;
    for (const int64_t n : sample.region.shape()) size *= n;
    for (int64_t global = 0; global <= size + 1; global += pick(random, 1, 5)) {
      const auto before =
          std::lower_bound(sample.elements.begin(), sample.elements.end(), global) - sample.elements.begin();
      ASSERT_EQ(sample.region.position(global), before) << sample.region.to_string() << ", element " << global;
    }
  }
}

TEST(RegionEquality, IsOfElementsNotOfHowTheyWereCut) {
  const Region rows = Region::grid({6, 4}, {{{2, 4}}, {{0, 4}}});
  EXPECT_EQ(rows, Region::whole({6, 4}).window(8, 16));
  EXPECT_EQ(rows.window(2, 2), Region::grid({6, 4}, {{}, {}}));
  EXPECT_FALSE(rows == Region::grid({6, 4}, {{{1, 3}}, {{0, 4}}}));
  EXPECT_FALSE(rows == Region::grid({4, 6}, {{{2, 4}}, {{0, 4}}}));
  EXPECT_FALSE(rows == Region::grid({6, 4}, {{{2, 4}}, {{0, 3}}}));
  const Region all = Region::whole({6, 4});
  EXPECT_FALSE(all.window(0, 8) == all.window(8, 16));
  EXPECT_FALSE(all.window(0, 8) == Region::whole({6, 4}).window(8, 16));
}

TEST(RegionEquality, AgreesWithTheElements) {
  Random random(4);
  for (int i = 0; i < 1000; ++i) {
    const Shape shape = {pick(random, 1, 2), pick(random, 1, 2)};  // small, so that equal pairs occur
    const auto draw = [&] {
      const Region grid = Region::grid(shape, oracle::random_dims(random, shape));
      return grid.window(pick(random, 0, grid.size()), grid.size());
    };
    const Region a = draw(), b = draw();
    EXPECT_EQ(a == b, oracle::elements(a) == oracle::elements(b)) << a.to_string() << " and " << b.to_string();
  }
}

}  // namespace
}  // namespace shardow::oracle
