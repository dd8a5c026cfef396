#include "group/counts.h"

#include <gtest/gtest.h>

#include "delegate.h"
#include "group/group_fixture.h"

namespace shardow::group {
namespace {

/// A group whose rank `broken` cannot send.
class Blocks : public Delegate {
 public:
  Blocks(Group& group, int broken) : Delegate(group), broken_(broken) {}
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    if (rank() == broken_) throw Error(Code::kPeerFailed, "no block leaves here");
    Delegate::send(bytes, to, deadline);
  }

 private:
  int broken_;
};

/// Joins as a call does: within a step of it.
void join(Group& group, std::span<const Counts> counts, Deadline deadline) {
  agree(group, far(), [&] { join_on_first(group, counts, deadline); });
}

TEST(Counts, AreJoinedOnRank0) {
  for (const int size : {1, 2, 3, 7, 8}) {
    Groups groups = threads(size);
    on_every_rank(groups, [&](auto& group) {
      const auto rank = static_cast<uint64_t>(group->rank());
      std::vector<uint64_t> sums{1, 10 * rank, ~uint64_t{0}}, bits{uint64_t{1} << rank, 5}, none;
      join(*group, std::vector<Counts>{{sums, Op::kSum}, {none, Op::kSum}, {bits, Op::kXor}}, far());
      if (rank > 0) return;
      const auto n = static_cast<uint64_t>(size);
      EXPECT_EQ(sums, (std::vector<uint64_t>{n, 5 * n * (n - 1), ~uint64_t{0} * n})) << size;
      EXPECT_EQ(bits, (std::vector<uint64_t>{(uint64_t{1} << n) - 1, n % 2 == 1 ? 5u : 0u})) << size;
    });
  }
}

TEST(Counts, ThatDoNotComeAreAnErrorOnAllAndTheyStayInStep) {
  Groups groups = threads(7);
  on_every_rank(groups, [&](auto& own) {
    Blocks group(*own, 4);
    std::vector<uint64_t> numbers(10, 1);
    EXPECT_NE(caught([&] { join(group, std::vector<Counts>{{numbers, Op::kSum}}, near()); }).message, "");
    expect_in_step(*own);
  });
}

}  // namespace
}  // namespace shardow::group
