#include "group/collective_call.h"

#include <gtest/gtest.h>

#include <vector>

#include "group/group_fixture.h"

namespace shardow::group {
namespace {

TEST(CollectiveCall, HasItsWorkDoneByEachRankUntilItHasNoMoreAndToldOnRank0) {
  Groups groups = threads(3);
  std::vector<int64_t> progress;
  on_every_rank(groups, [&](auto& group) {
    const int rank = group->rank(), own = 3 - rank;  // the last rank is done first
    int calls = 0;
    CollectiveCall call(*group, std::chrono::minutes(2), [&, rank](int64_t done, int64_t total) {
      EXPECT_EQ(rank, 0);
      EXPECT_EQ(total, 60);
      if (rank == 0) progress.push_back(done);
    });
    call.work(60, [&] { return Part{10, ++calls >= own}; });
    EXPECT_EQ(calls, own);
    call.tell_progress();
  });
  EXPECT_EQ(progress, (std::vector<int64_t>{0, 30, 50, 60}));
}

}  // namespace
}  // namespace shardow::group
