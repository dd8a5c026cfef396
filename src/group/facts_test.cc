// Facts and copies that ranks compare: messages, and rounds.
#include "group/facts.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "group/group_fixture.h"
#include "group/store_group.h"

namespace shardow::group {
namespace {

using std::chrono::minutes;

/// Returns the messages of all ranks; those that differ take a further round.
std::set<std::string> messages(const std::vector<Facts>& by_rank) {
  auto groups = threads(static_cast<int>(by_rank.size()));
  std::vector<std::string> all(groups.size());
  std::vector<std::jthread> ranks;
  for (size_t rank = 0; rank < groups.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      const auto& group = dynamic_cast<StoreGroup&>(*groups[rank]);
      EqualFacts facts("call()", by_rank[rank]);
      try {
        CollectiveCall(*groups[rank], minutes(1)).compare([&] { return Comparisons{&facts}; });
        EXPECT_EQ(group.rounds(), 1);
      } catch (const Error& error) {
        EXPECT_EQ(group.rounds(), 2);
        all[rank] = error.code() == Code::kInvalidArgument ? error.what() : "another error";
      }
    });
  }
  ranks.clear();
  return {all.begin(), all.end()};
}

Facts with(Facts facts, const Fact& fact) {
  facts.push_back(fact);
  return facts;
}

const std::string kLong(1000, 'x');

TEST(Facts, ThatDifferAreNamedWithBothValuesOnAllRanks) {
  const std::set<std::string> step = {"call(): ranks disagree. step is 3 on rank 0 and 4 on rank 2; count anew"};
  const Facts three = {{"path", "a"}, {"step", "3", "count anew"}}, four = {{"path", "a"}, {"step", "4", "count anew"}};
  EXPECT_EQ(messages({three, three, four}), step);
  EXPECT_EQ(messages({three, three, three}), std::set<std::string>{""});
  const std::set<std::string> missing = {"call(): ranks disagree. b is missing on rank 0 and 1 on rank 1"};
  EXPECT_EQ(messages({{{"a", "0"}}, {{"a", "0"}, {"b", "1"}}}), missing);
  EXPECT_EQ(messages({{{"a", "0"}, {"b", "1"}}, {{"a", "0"}}}),
            std::set<std::string>{"call(): ranks disagree. b is 1 on rank 0 and missing on rank 1"});
}

TEST(Facts, OfAnyLengthAreComparedInAnyOrder) {
  const Facts first = {{"list", kLong}, {"step", "3"}}, other = {{"list", kLong}, {"step", "4"}};
  const std::string step = "call(): ranks disagree. step is 3 on rank 0 and 4 on rank 1";
  EXPECT_EQ(messages({first, other}), std::set<std::string>{step});
  EXPECT_EQ(messages({first, {{"step", "4"}}}).size(), 1u);
  EXPECT_EQ(messages({first, first}), std::set<std::string>{""});
  const Facts turned = {{"step", "3"}, {"list", kLong}};
  EXPECT_EQ(messages({first, turned}), std::set<std::string>{""});
}

TEST(Facts, OfBytesAreComparedAmongThoseWhoHoldThem) {
  const auto copy = [](const char* name, const char* sum, const char* set) {
    return Fact{std::string("'") + name + "'" + '\0' + "region", sum, "copy it", set};
  };
  const Facts all = {copy("all", "1", "all")}, changed = {copy("all", "2", "all")};
  const std::set<std::string> differ = {"call(): 'all' has other values on rank 0 than on rank 2; copy it"};
  EXPECT_EQ(messages({all, all, changed}), differ);
  EXPECT_EQ(messages({with(all, copy("one", "1", "pair 0")), with(all, copy("other", "7", "pair 1"))}),
            std::set<std::string>{""});
  EXPECT_EQ(messages({with(all, copy("one", "1", "a")), all, with(changed, copy("other", "7", "b"))}), differ);
  EXPECT_EQ(messages({all, {}, all}), std::set<std::string>{""});
  const Fact more = copy("more", "1", "all"), other = copy("more", "2", "all");
  EXPECT_EQ(messages({with(all, more), with(changed, other)}),
            std::set<std::string>{"call(): 'all' (and 1 more) has other values on rank 0 than on rank 1; copy it"});
}

}  // namespace
}  // namespace shardow::group
