#include "file/json.h"

#include <gtest/gtest.h>

namespace shardow::file {
namespace {

std::string as_json(std::string_view text) {
  std::string out;
  append_json_text(out, text);
  return out;
}

TEST(Json, KeepsWhatIsUtf8AndEscapesWhatJsonAsksFor) {
  EXPECT_EQ(as_json("a\"b\\c\n\x1b\x7f"), "\"a\\\"b\\\\c\\u000a\\u001b\x7f\"");
  EXPECT_EQ(as_json("\xc3\xa9 \xf0\x9f\x98\x80"), "\"\xc3\xa9 \xf0\x9f\x98\x80\"");
}

/// PEP 383, byte by byte: cut off, overlong, a surrogate, beyond the last character.
TEST(Json, EscapesBytesThatAreNoUtf8AsPythonDoes) {
  EXPECT_EQ(as_json("\xff"), "\"\\udcff\"");
  EXPECT_EQ(as_json("a\xc3"), "\"a\\udcc3\"");
  EXPECT_EQ(as_json("\xc0\x80"), "\"\\udcc0\\udc80\"");
  EXPECT_EQ(as_json("\xed\xa0\x80x"), "\"\\udced\\udca0\\udc80x\"");
  EXPECT_EQ(as_json("\xf4\x90\x80\x80"), "\"\\udcf4\\udc90\\udc80\\udc80\"");
}

}  // namespace
}  // namespace shardow::file
