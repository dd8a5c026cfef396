#include "cli/renames.h"

#include <gtest/gtest.h>

#include "shardow/error.h"

namespace shardow::cli {
namespace {

using Names = std::map<std::string, std::string>;  // new, old

TEST(Renames, TheFirstRuleThatFitsIsAppliedOnce) {
  const Renames renames({"a.bias=x", "a.*=b.*", "*.gamma=*.weight", "b.*=never.*"});
  EXPECT_EQ(renames.apply({"a.bias", "a.w", "b.c", "n.gamma", "other"}),
            (Names{{"x", "a.bias"}, {"b.w", "a.w"}, {"never.c", "b.c"}, {"n.weight", "n.gamma"}, {"other", "other"}}));
  EXPECT_EQ(Renames({"module.*=*"}).apply({"module.w"}), (Names{{"w", "module.w"}}));
  EXPECT_EQ(Renames({"*=ema.*"}).apply({"", "w"}), (Names{{"ema.", ""}, {"ema.w", "w"}}));
  EXPECT_EQ(Renames({"a=b=c"}).apply({"a"}), (Names{{"b=c", "a"}}));
  EXPECT_EQ(Renames({"ab*ba=x"}).apply({"abba", "aba"}), (Names{{"x", "abba"}, {"aba", "aba"}}));
}

TEST(Renames, RefusesWhatIsNoRuleOrNoUse) {
  for (const char* rule : {"", "a", "=a", "a=*", "a*b*=c", "a*=**"}) EXPECT_THROW(Renames({rule}), Error) << rule;
  EXPECT_THROW(Renames({"a=b"}).apply({"a", "b"}), Error);
  EXPECT_THROW(Renames({"a*=x"}).apply({"a1", "a2"}), Error);
  EXPECT_THROW(Renames({"typo=b"}).apply({"a"}), Error);
  EXPECT_THROW(Renames({"*=a.*", "b=c"}).apply({"b"}), Error);
}

}  // namespace
}  // namespace shardow::cli
