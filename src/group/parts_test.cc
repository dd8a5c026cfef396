#include "group/parts.h"

#include <gtest/gtest.h>

#include <vector>

#include "group/group_fixture.h"

namespace shardow::group {
namespace {

TEST(Parts, AreDoneByEachRankUntilItHasNoMoreAndToldOnRank0) {
  Groups groups = threads(3);
  std::vector<int64_t> progress;
  on_every_rank(groups, [&](auto& group) {
    const int rank = group->rank(), own = 3 - rank;  // the last rank is done first
    int calls = 0;
    Parts parts(*group, std::chrono::minutes(2), 60, [&, rank](int64_t done, int64_t total) {
      EXPECT_EQ(rank, 0);
      EXPECT_EQ(total, 60);
      if (rank == 0) progress.push_back(done);
    });
    parts.run([&] { return Part{10, ++calls >= own}; });
    EXPECT_EQ(calls, own);
    parts.tell();
  });
  EXPECT_EQ(progress, (std::vector<int64_t>{0, 30, 50, 60}));
}

}  // namespace
}  // namespace shardow::group
