#include "base/errors.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace shardow::base {
namespace {

constexpr Code kAll[] = {
    Code::kInvalidArgument, Code::kNotFound,    Code::kCorrupt, Code::kUnsupported, Code::kIo,
    Code::kOutOfSpace,      Code::kOutOfMemory, Code::kTimeout, Code::kPeerFailed,  Code::kInternal};

TEST(Errors, FailThrowsTheCodeAndTheFormattedMessage) {
  try {
    fail(Code::kCorrupt, "'{}' has {} bytes, not {}", "w", 3, 4);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_STREQ(error.what(), "'w' has 3 bytes, not 4");
    EXPECT_EQ(error.os_errno(), 0);
  }
}

TEST(Errors, NamesAreThoseOfPython) {
  EXPECT_STREQ(code_name(Code::kInvalidArgument), "invalid_argument");
  EXPECT_STREQ(code_name(Code::kOutOfSpace), "out_of_space");
  EXPECT_STREQ(code_name(Code::kPeerFailed), "peer_failed");
}

TEST(Errors, EveryCodeHasItsOwnNameAndExitCode) {
  std::set<std::string> names;
  std::set<int> exits;
  for (const Code code : kAll) {
    names.insert(code_name(code));
    exits.insert(exit_code(code));
    EXPECT_GE(exit_code(code), 2);
    EXPECT_LE(exit_code(code), 125);
  }
  EXPECT_EQ(names.size(), std::size(kAll));
  EXPECT_EQ(exits.size(), std::size(kAll));
}

}  // namespace
}  // namespace shardow::base
