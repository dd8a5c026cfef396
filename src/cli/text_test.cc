#include "cli/text.h"

#include <gtest/gtest.h>

#include <limits>

namespace shardow::cli {
namespace {

TEST(Text, ShowsWhatATerminalWouldObey) {
  EXPECT_EQ(shown("plain \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), "plain \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  EXPECT_EQ(shown("a\nb\x1b[0m\x7f\t"), "a\\x0ab\\x1b[0m\\x7f\\x09");
  EXPECT_EQ(shown("\xc2\x9b"), "\\u009b");              // a control of Latin-1, which some terminals take for ESC [
  EXPECT_EQ(shown("\xe2\x80\xae"), "\\u202e");          // writes backwards
  EXPECT_EQ(shown("\xff\xc3"), "\\xff\\xc3");           // no UTF-8
  EXPECT_EQ(shown("\xc0\x80"), "\\xc0\\x80");           // too long a form
  EXPECT_EQ(shown("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(shown("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
}

TEST(Text, ShowsBytesInUnits) {
  EXPECT_EQ(shown_bytes(0), "0 B");
  EXPECT_EQ(shown_bytes(999), "999 B");
  EXPECT_EQ(shown_bytes(1000), "1.00 kB");
  EXPECT_EQ(shown_bytes(999'999), "1.00 MB");
  EXPECT_EQ(shown_bytes(5'370'000'000), "5.37 GB");
  EXPECT_EQ(shown_bytes(std::numeric_limits<int64_t>::max()), "9.22 EB");
}

TEST(Json, IsADocument) {
  EXPECT_EQ(Json::object({{"a\"\n", "\xff\xc3\xa9"},
                          {"list", std::vector<Json>{-1, 0.1, nullptr}},
                          {"none", Json::object({})},
                          {"inf", std::numeric_limits<double>::infinity()},
                          {"yes", true}})
                .document(),
            "{\"a\\\"\\u000a\":\"\\udcff\xc3\xa9\",\"list\":[-1,0.1,null],\"none\":{},\"inf\":null,\"yes\":true}");
}

}  // namespace
}  // namespace shardow::cli
