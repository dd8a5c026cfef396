// For tests of groups: the checks of group_checks.h as expectations, ranks as threads, and calls that
// go wrong.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "findings.h"
#include "group_checks.h"

namespace shardow::group {

/// Groups of all ranks, as the engine knows them.
struct Groups : std::vector<std::unique_ptr<Ranks>> {
  Groups() = default;
  Groups(std::vector<std::unique_ptr<Group>> made) {
    for (auto& group : made) add(std::move(group));
  }
  void add(std::unique_ptr<Group> group) { emplace_back(static_cast<Ranks*>(group.release())); }
};

/// body(rank's group), each rank on a thread of its own; all are destroyed afterwards, or earlier by the body.
inline void on_every_rank(Groups& groups, const std::function<void(std::unique_ptr<Ranks>&)>& body) {
  std::vector<std::jthread> ranks;
  for (auto& group : groups) ranks.emplace_back([&] { body(group); });
}

inline void expect_fine(const GroupCheck& check, Group& group) {
  for (const std::string& wrong : check.run(group))
    ADD_FAILURE() << check.name << ", rank " << group.rank() << ": " << wrong;
}

inline void expect_check(const std::string& name, Group& group) {
  for (const GroupCheck& check : group_checks()) {
    if (check.name == name) return expect_fine(check, group);
  }
  ADD_FAILURE() << "no check " << name;
}

inline void expect_in_step(Group& group) {
  expect_check("rounds_do_not_mix", group);
}

/// How a message ends on calls that differ.
inline constexpr const char* kSame = "; every rank must make the same collective calls in the same order";

/// Calls that wait for rank 1.
struct WaitingCall {
  const char* name;
  bool of_all;  ///< else of this rank and rank 1
  void (*call)(Ranks&);
};
inline constexpr WaitingCall kWaitingCalls[] = {
    {"all_gather", true, [](Ranks& g) { g.all_gather("", far()); }},
    {"broadcast", true, [](Ranks& g) { g.broadcast({}, 1, far()); }},
    {"recv", false, [](Ranks& g) { g.recv({}, 1, far()); }},
    {"send", false, [](Ranks& g) { g.send({}, 1, far()); }},
    {"agree", true, [](Ranks& g) { agree(g, far(), [] {}); }},
};

inline void expect_gone(const WaitingCall& waiting, Ranks& group, int gone) {
  const Caught got = caught([&] { waiting.call(group); });
  EXPECT_EQ(got.code, Code::kPeerFailed) << waiting.name << ": " << got.message;
  EXPECT_NE(got.message.find("rank " + std::to_string(gone) + " is gone"), std::string::npos) << got.message;
}

/// Ranks of one group, three at least, that make other calls than each other.
inline void expect_misfits_refused(Ranks& group) {
  struct Misfit {
    void (*call)(Ranks&);
    const char* message;
  };
  constexpr Misfit kMisfits[] = {
      {[](Ranks& g) { g.broadcast({}, g.rank() == 0 ? 1 : 0, far()); },
       "rank 1 calls broadcast(0 bytes from rank 0) where rank 0 calls broadcast(0 bytes from rank 1)"},
      {[](Ranks& g) { g.rank() == 0 ? static_cast<void>(g.all_gather("", far())) : g.broadcast({}, 0, far()); },
       "rank 1 calls broadcast(0 bytes from rank 0) where rank 0 calls all_gather()"},
  };
  for (const auto& [call, message] : kMisfits) {
    const Caught got = caught([&] { call(group); });
    EXPECT_EQ(got.code, Code::kInvalidArgument);
    EXPECT_EQ(got.message, message + std::string(kSame));
    expect_in_step(group);
  }
}

}  // namespace shardow::group
