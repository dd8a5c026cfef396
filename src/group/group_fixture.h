// For tests of groups: the checks of group_checks.h as expectations, ranks as threads, and calls that
// go wrong.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "findings.h"
#include "group_checks.h"

namespace shardow::group {

using Groups = std::vector<std::unique_ptr<Group>>;

/// body(rank's group), each rank on a thread of its own; all are destroyed afterwards, or earlier by the body.
inline void on_every_rank(Groups& groups, const std::function<void(std::unique_ptr<Group>&)>& body) {
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
  void (*call)(Group&);
};
inline constexpr WaitingCall kWaitingCalls[] = {
    {"all_gather", true, [](Group& g) { g.all_gather("", far()); }},
    {"broadcast", true, [](Group& g) { g.broadcast({}, 1, far()); }},
    {"recv", false, [](Group& g) { g.recv({}, 1, far()); }},
    {"send", false, [](Group& g) { g.send({}, 1, far()); }},
    {"agree", true, [](Group& g) { agree(g, far(), [] {}); }},
};

inline void expect_gone(const WaitingCall& waiting, Group& group, int gone) {
  const Caught got = caught([&] { waiting.call(group); });
  EXPECT_EQ(got.code, Code::kPeerFailed) << waiting.name << ": " << got.message;
  EXPECT_NE(got.message.find("rank " + std::to_string(gone) + " is gone"), std::string::npos) << got.message;
}

/// Ranks of one group, three at least, that make other calls than each other.
inline void expect_misfits_refused(Group& group) {
  struct Misfit {
    void (*call)(Group&);
    const char* message;
  };
  constexpr Misfit kMisfits[] = {
      {[](Group& g) {
         std::vector<uint64_t> values(g.rank() == 1 ? 2 : 3);
         g.all_reduce(values, Group::Op::kSum, far());
       },
       "rank 1 calls all_reduce(sum, 2 values) where rank 0 calls all_reduce(sum, 3 values)"},
      {[](Group& g) { g.all_reduce({}, g.rank() == 2 ? Group::Op::kMax : Group::Op::kXor, far()); },
       "rank 2 calls all_reduce(max, 0 values) where rank 0 calls all_reduce(xor, 0 values)"},
      {[](Group& g) { g.broadcast({}, g.rank() == 0 ? 1 : 0, far()); },
       "rank 1 calls broadcast(0 bytes from rank 0) where rank 0 calls broadcast(0 bytes from rank 1)"},
      {[](Group& g) { g.rank() == 0 ? static_cast<void>(g.all_gather("", far())) : g.broadcast({}, 0, far()); },
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
