#include <gtest/gtest.h>

#include <latch>
#include <thread>

#include "delegate.h"
#include "group/group_fixture.h"

namespace shardow {
namespace {

using group::caught;
using group::Caught;
using group::expect_fine;
using group::far;
using group::Groups;
using group::kSame;
using group::near;
using group::on_every_rank;

class ThreadGroups : public testing::TestWithParam<std::tuple<GroupCheck, int>> {};

TEST_P(ThreadGroups, Conform) {
  Groups groups = threads(std::get<1>(GetParam()));
  on_every_rank(groups, [](auto& group) { expect_fine(std::get<0>(GetParam()), *group); });
}

INSTANTIATE_TEST_SUITE_P(All, ThreadGroups,
                         testing::Combine(testing::ValuesIn(group_checks()), testing::Values(1, 2, 3, 8)),
                         [](const auto& test) {
                           return fmt::format("{}_{}", std::get<0>(test.param).name, std::get<1>(test.param));
                         });

class SoloGroup : public testing::TestWithParam<GroupCheck> {};

TEST_P(SoloGroup, Conforms) {
  expect_fine(GetParam(), *solo());
}

INSTANTIATE_TEST_SUITE_P(All, SoloGroup, testing::ValuesIn(group_checks()),
                         [](const auto& test) { return test.param.name; });

TEST(Threads, KnowTheirRankAndSize) {
  const Groups groups = threads(5);
  for (int r = 0; r < 5; ++r) {
    EXPECT_EQ(groups[static_cast<size_t>(r)]->rank(), r);
    EXPECT_EQ(groups[static_cast<size_t>(r)]->size(), 5);
  }
  EXPECT_EQ(caught([] { threads(0); }).code, Code::kInvalidArgument);
}

TEST(Threads, EveryMissingRankIsNamedAtTheDeadline) {
  Groups groups = threads(4);
  std::latch given_up(1);
  on_every_rank(groups, [&](auto& group) {
    if (group->rank() != 1) given_up.wait();
    const Caught got = caught([&] { group->all_gather("", group->rank() == 1 ? near() : far()); });
    EXPECT_EQ(got.code, Code::kTimeout);
    EXPECT_EQ(got.message,
              "all_gather() is collective, every rank must call it: rank(s) [0, 2, 3] did not take part before the "
              "deadline. Call it on all ranks (not under `if rank == 0`), or look for the rank that died");
    if (group->rank() == 1) given_up.count_down();
  });
}

TEST(Threads, RanksMayBeSeveralRoundsApart) {
  Groups groups = threads(2);
  std::latch given_up(1);
  on_every_rank(groups, [&](auto& group) {
    const bool late = group->rank() == 1;
    if (late) given_up.wait();
    for (int round = 0; round < 3; ++round) {
      EXPECT_EQ(caught([&] { group->all_gather("", late ? far() : near()); }).code, Code::kTimeout);
    }
    if (!late) given_up.count_down();
    EXPECT_EQ(group->all_gather("now", far()), (std::vector<std::string>{"now", "now"}));
  });
}

TEST(Threads, ARoundThatCompletesIsTakenEvenPastTheDeadline) {
  EXPECT_EQ(threads(1)[0]->all_gather("a", Deadline::min()), std::vector<std::string>{"a"});
}

TEST(Threads, AGoneRankEndsWaitingAtOnce) {
  for (const group::WaitingCall& waiting : group::kWaitingCalls) {
    Groups groups = threads(3);
    on_every_rank(groups, [&](auto& group) {
      if (group->rank() == 1) return group.reset();
      for (int again = 0; again < 2; ++again)
        group::expect_gone(waiting, *group, 1);  // whether it left before or after the call began
    });
  }
}

TEST(Threads, AGoneRankIsSeenByThoseThatWaitAlready) {
  Groups groups = threads(2);
  std::jthread waiting([&] { EXPECT_EQ(caught([&] { groups[0]->all_gather("", far()); }).code, Code::kPeerFailed); });
  groups[1].reset();
}

TEST(Threads, WhatARankDidBeforeItLeftCounts) {
  Groups groups = threads(3);
  on_every_rank(groups, [&](auto& group) {
    EXPECT_EQ(group->all_gather("here", far()).size(), 3u);
    if (group->rank() == 1) group.reset();
  });
  std::byte token{};
  std::jthread sender([&] { groups[0]->send({&token, 1}, 2, far()); });
  groups[2]->recv({&token, 1}, 0, far());  // the others still have each other
}

TEST(Threads, CallsThatDoNotFitAreRefusedOnEveryRank) {
  Groups groups = threads(3);
  on_every_rank(groups, [](auto& group) { group::expect_misfits_refused(*group); });
}

TEST(Threads, RanksThatMeetInDifferentCallsAreToldSo) {
  constexpr std::chrono::seconds kTimeout{60};
  Groups groups = threads(3);
  on_every_rank(groups, [&](auto& group) {
    group->begin(group->rank() == 1 ? "load()" : "save()", kTimeout);
    for (const char* const later : {"", "a later step of "}) {
      const Caught got = caught([&] { agree(*group, far(), [] {}); });
      EXPECT_EQ(got.code, Code::kInvalidArgument);
      EXPECT_EQ(got.message, fmt::format("rank 1 calls {0}load() where rank 0 calls {0}save(){1}", later, kSame));
    }
    group->begin("save()", kTimeout);
    if (group->rank() == 2) {
      EXPECT_EQ(caught([&] { agree(*group, far(), [] {}); }).message, "");
      group->begin("save()", kTimeout);  // another one, where the others go on with theirs
    } else {
      agree(*group, far(), [] {});
    }
    const Caught got = caught([&] { agree(*group, far(), [] {}); });
    EXPECT_EQ(got.message, fmt::format("rank 2 calls save() where rank 0 calls a later step of save(){}", kSame));
  });
}

TEST(Threads, ARankThatNamesAWrongRootIsRefusedOnEveryRank) {
  Groups groups = threads(2);
  on_every_rank(groups, [](auto& group) {
    const Deadline deadline = base::after(std::chrono::seconds(10));
    const Caught got = caught([&] { group->broadcast({}, group->rank() == 1 ? 7 : 0, deadline); });
    EXPECT_EQ(got.code, Code::kInvalidArgument) << got.message;
  });
}

TEST(Threads, BlocksOfDifferentLengthAreRefusedOnBothSides) {
  Groups groups = threads(2);
  on_every_rank(groups, [&](auto& group) {
    std::vector<std::byte> bytes(group->rank() == 0 ? 4 : 5);
    const Caught got =
        caught([&] { group->rank() == 0 ? group->send(bytes, 1, far()) : group->recv(bytes, 0, far()); });
    EXPECT_EQ(got.code, Code::kInvalidArgument);
    EXPECT_NE(got.message.find("5 bytes"), std::string::npos) << got.message;
  });
}

TEST(Threads, ASenderWithoutReceiverTimesOut) {
  Groups groups = threads(2);
  const Caught got = caught([&] { groups[0]->send({}, 1, near()); });
  EXPECT_EQ(got.code, Code::kTimeout);
  EXPECT_NE(got.message.find("rank(s) [1] did not take part"), std::string::npos) << got.message;
  EXPECT_EQ(caught([&] { groups[1]->recv({}, 0, far()); }).code, Code::kTimeout)
      << "the late receiver gets the same verdict";
}

TEST(Threads, PairsDoNotDisturbCollectives) {
  Groups groups = threads(2);
  on_every_rank(groups, [&](auto& group) {
    EXPECT_EQ(group->all_gather("1", far()).size(), 2u);
    std::byte token{static_cast<unsigned char>(group->rank())};
    group->rank() == 0 ? group->send({&token, 1}, 1, far()) : group->recv({&token, 1}, 0, far());
    EXPECT_EQ(token, std::byte{0});
    EXPECT_EQ(group->all_gather("2", far()), (std::vector<std::string>{"2", "2"}));
  });
}

}  // namespace
}  // namespace shardow
