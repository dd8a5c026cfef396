#include <gtest/gtest.h>

#include <string>

#include "base/errors.h"
#include "shardow/region.h"
#include "tensor/region_oracle_fixture.h"

namespace shardow {
namespace {

using oracle::pick;
using oracle::Random;
using oracle::random_sample;

TEST(RegionText, SaysWhatIsHeld) {
  EXPECT_EQ(Region::whole({}).to_string(), "[]");
  EXPECT_EQ(Region::whole({7, 8}).to_string(), "[7, 8]");
  EXPECT_EQ(Region::grid({7, 8}, {{{0, 2}, {4, 6}}, {{0, 8}}}).window(3, 17).to_string(),
            "[7, 8] at [0:2 + 4:6, 0:8], elements 3:17");
  EXPECT_EQ(Region::grid({7}, {{}}).to_string(), "[7] at [none]");
  EXPECT_EQ(Region::grid({20}, {{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}}}).to_string(),
            "[20] at [0:1 + 2:3 + 4:5 + 6:7 + ... (5 intervals)]");
}

TEST(RegionBytes, ComeBackTheSame) {
  Random random(11);
  for (int i = 0; i < 500; ++i) {
    const Region region = random_sample(random, i % 2 == 1).region;
    const Region back = Region::decode(region.encode());
    EXPECT_EQ(back, region);
    EXPECT_EQ(back.to_string(), region.to_string());
  }
  EXPECT_EQ(Region::decode(Region::whole({kMax}).encode()), Region::whole({kMax}));
}

TEST(RegionBytes, HaveAFixedForm) {
  const Region region = Region::grid({300, 2}, {{{1, 3}, {7, 300}}, {{0, 2}}}).window(2, 8);
  EXPECT_EQ(region.encode(), std::string("\x01\x02\xac\x02\x02\x01\x02\x04\xa5\x02\x02\x01\x00\x02\x02\x08", 16));
}

TEST(RegionBytes, DecodeRefusesEverythingElse) {
  const std::string cases[] = {
      "",
      std::string("\x02\x00\x00\x01", 4),                                  // another version
      std::string("\x01\x00\x00", 3),                                      // ends early
      std::string("\x01\x00\x00\x01\x00", 5),                              // goes on
      std::string("\x01\x80\x00\x00\x01", 5),                              // an overlong zero
      std::string("\x01\x00\x00\x02", 4),                                  // a window beyond the grid
      std::string("\x01\x00\x01\x00", 4),                                  // a window that ends before it begins
      std::string("\x01\x41", 2),                                          // 65 dimensions
      std::string("\x01\x01\x08\x01\x00\x09\x00\x08", 8),                  // an interval beyond its dimension
      std::string("\x01\x01\x08\x02\x00\x02\x00\x02\x00\x04", 10),         // intervals that touch
      std::string("\x01\x01\x08\x01\x00\x00\x00\x00", 8),                  // an empty interval
      std::string("\x01\x01\x08\xff\xff\xff\xff\x7f", 8),                  // intervals that cannot be there
      std::string("\x01\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 12)  // a number above 2^63
  };
  for (const std::string& bytes : cases) {
    try {
      Region::decode(bytes);
      ADD_FAILURE() << "accepted " << testing::PrintToString(bytes);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kCorrupt) << error.what();
    }
  }
}

TEST(RegionBytes, DecodeOfDamagedBytesRefusesOrMakesAnotherRegion) {
  Random random(12);
  for (int i = 0; i < 3000; ++i) {
    const std::string good = random_sample(random, true).region.encode();
    std::string bad = good;
    bad[static_cast<size_t>(pick(random, 0, static_cast<int64_t>(bad.size()) - 1))] ^=
        static_cast<char>(pick(random, 1, 255));
    try {
      EXPECT_EQ(Region::decode(bad).encode(), bad);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kCorrupt);
    }
  }
}

}  // namespace
}  // namespace shardow
