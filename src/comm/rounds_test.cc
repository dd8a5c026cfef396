#include "comm/rounds.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "findings.h"

namespace shardow::comm {
namespace {

const Lane kAll{Lane::Kind::kAll, {0, 1, 2}};

/// True when a thread of this process waits for something.
bool sleeps(pid_t thread) {
  std::ifstream stat("/proc/self/task/" + std::to_string(thread) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(stat), {}};
  return text.find(") S ") != std::string::npos;
}

TEST(Rounds, ARankThatCameDidItsPartAndLeftFailsNobody) {
  Rounds rounds(3);
  std::atomic<pid_t> waiting = 0;
  std::jthread one([&] {
    waiting = ::gettid();
    EXPECT_EQ(rounds.meet(1, kAll, {"call", "of 1"}, far())->size(), 3u);
  });
  while (waiting == 0 || !sleeps(waiting)) std::this_thread::yield();  // it has come, and waits for the others
  rounds.leave(1);
  std::jthread two([&] { EXPECT_EQ(rounds.meet(2, kAll, {"call", "of 2"}, far())->at(1), "of 1"); });
  EXPECT_EQ(*rounds.meet(0, kAll, {"call", "of 0"}, far()), (std::vector<std::string>{"of 0", "of 1", "of 2"}));
  EXPECT_EQ(caught([&] { rounds.meet(0, kAll, {"call", ""}, far()); }).message, "call: rank 1 is gone");
}

TEST(Rounds, WhatHasBeenDecidedStaysSoWhenAMemberLeaves) {
  const Lane pair{Lane::Kind::kPair, {0, 1}};
  for (int again = 0; again < 200; ++again) {
    Rounds rounds(2);
    std::jthread zero([&] { EXPECT_EQ(caught([&] { rounds.meet(0, pair, {"call", ""}, far()); }).message, ""); });
    rounds.meet(1, pair, {"call", ""}, far());
    rounds.leave(1);  // before the other has seen that the round is complete, most times
  }
}

TEST(Rounds, AVerdictStaysAsItIsWhenTheMissingMemberLeaves) {
  Rounds rounds(3);
  const Caught first = caught([&] { rounds.meet(0, kAll, {"call", ""}, near()); });
  rounds.leave(2);  // for whom rank 0 has waited in vain
  const Caught late = caught([&] { rounds.meet(1, kAll, {"call", ""}, far()); });
  EXPECT_EQ(late.code, Code::kTimeout);
  EXPECT_EQ(late.message, first.message);
}

TEST(Rounds, AreForgottenWhenAllMembersHaveComeToThem) {
  const Lane pair{Lane::Kind::kPair, {0, 1}};
  Rounds rounds(2);
  std::vector<std::weak_ptr<const Rounds::Bytes>> of_round;
  for (int again = 0; again < 3; ++again) {
    std::jthread other([&] { rounds.meet(1, pair, {"call", "theirs"}, far()); });
    of_round.emplace_back(rounds.meet(0, pair, {"call", "ours"}, far()));
  }
  for (const auto& bytes : of_round) EXPECT_TRUE(bytes.expired());
}

TEST(Rounds, AreForgottenWhenTheOtherMembersAreGone) {
  Rounds rounds(3);
  rounds.leave(1);
  const auto fail = [&](int rank) {
    EXPECT_EQ(caught([&] {
                rounds.meet(rank, kAll, {"call", std::string(100'000, '.')}, far());
              }).message,
              "call: rank 1 is gone");
  };
  fail(0);
  fail(2);
  const struct mallinfo2 before = ::mallinfo2();
  for (int again = 0; again < 100; ++again) {
    fail(0);
    fail(2);
  }
  const struct mallinfo2 after = ::mallinfo2();
  EXPECT_LT(after.uordblks + after.hblkhd, before.uordblks + before.hblkhd + 1'000'000);
}

}  // namespace
}  // namespace shardow::comm
