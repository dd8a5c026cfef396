#include "base/checked.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

namespace shardow::base {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

template <typename Fn>
std::string message_of(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Checked, AddIsExactUpToTheLimits) {
  EXPECT_EQ(checked_add(kMax - 1, 1), kMax);
  EXPECT_EQ(checked_add(kMin, kMax), -1);
  EXPECT_EQ(message_of([] { checked_add(kMax, 1); }), "9223372036854775807 + 1 does not fit in 64 bits");
  EXPECT_EQ(message_of([] { checked_add(kMin, -1); }), "-9223372036854775808 + -1 does not fit in 64 bits");
}

TEST(Checked, MulIsExactUpToTheLimits) {
  EXPECT_EQ(checked_mul(int64_t{1} << 31, int64_t{1} << 31), int64_t{1} << 62);
  EXPECT_EQ(checked_mul(kMax, -1), -kMax);
  EXPECT_EQ(message_of([] { checked_mul(int64_t{1} << 32, int64_t{1} << 31); }),
            "4294967296 * 2147483648 does not fit in 64 bits");
  EXPECT_NE(message_of([] { checked_mul(kMin, -1); }), "nothing was thrown");
}

TEST(Checked, ProductOfAShape) {
  struct Case {
    std::vector<int64_t> shape;
    int64_t elements;
  };
  for (const Case& c : {Case{{}, 1}, Case{{7}, 7}, Case{{3, 4, 5}, 60}, Case{{kMax}, kMax}, Case{{kMax, 0, kMax}, 0},
                        Case{{1, kMax, 1}, kMax}}) {
    EXPECT_EQ(checked_product(c.shape), c.elements);
  }
}

TEST(Checked, ProductRefusesWhatNoTensorHas) {
  EXPECT_EQ(message_of([] {
              checked_product(std::vector<int64_t>{2, kMax});
            }),
            "shape [2, 9223372036854775807] has more elements than fit in 64 bits");
  EXPECT_EQ(message_of([] { checked_product(std::vector<int64_t>{0, -1}); }), "shape [0, -1] has a negative size");
}

}  // namespace
}  // namespace shardow::base
