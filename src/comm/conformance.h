// For tests: what every Group must do, as a table. A filling's own test makes its ranks (threads, processes) and runs each case's body on
// all of them at once, every rank with its own Group; bodies check with EXPECT_ and leave the group in step for the next case. They work
// for any number of ranks. conformance_agree.h has the cases of agree().
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/errors.h"
#include "shardow/group.h"

namespace shardow::comm {

struct Conformance {
  const char* name;
  void (*body)(Group&);
};

/// Far enough that only a hang reaches it.
inline Deadline far() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(2);
}

/// For the cases in which it is meant to pass.
inline Deadline near() {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
}

struct Caught {
  bool thrown = false;
  Code code = Code::kInternal;
  std::string message;
};

template <typename Fn>
Caught caught(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return {true, error.code(), error.what()};
  }
  return {};
}

namespace conformance {

inline void all_gather_is_indexed_by_rank(Group& group) {
  const auto all = group.all_gather("rank " + std::to_string(group.rank()), far());
  ASSERT_EQ(all.size(), static_cast<size_t>(group.size()));
  for (size_t r = 0; r < all.size(); ++r) EXPECT_EQ(all[r], "rank " + std::to_string(r));
}

inline void all_gather_takes_any_bytes_of_any_length(Group& group) {
  const auto of = [](int r) {
    return r == 0 ? std::string() : std::string("\0\xff\n", 3) + std::string(static_cast<size_t>(r) * 5000, '\0');
  };
  const auto all = group.all_gather(of(group.rank()), far());
  for (int r = 0; r < group.size(); ++r) EXPECT_EQ(all.at(static_cast<size_t>(r)), of(r));
}

inline void rounds_do_not_mix(Group& group) {
  for (int round = 0; round < 50; ++round) {
    const auto all = group.all_gather(std::to_string(round), far());
    EXPECT_EQ(all, std::vector<std::string>(static_cast<size_t>(group.size()), std::to_string(round)));
  }
}

inline void all_reduce_combines_element_by_element(Group& group) {
  const auto n = static_cast<uint64_t>(group.size());
  const auto r = static_cast<uint64_t>(group.rank());
  std::vector<uint64_t> sum{r, 1, r == 0 ? ~uint64_t{0} : 1}, max{r, n - r}, exclusive{uint64_t{1} << r, 5};
  group.all_reduce(sum, Group::Op::kSum, far());
  group.all_reduce(max, Group::Op::kMax, far());
  group.all_reduce(exclusive, Group::Op::kXor, far());
  EXPECT_EQ(sum, (std::vector<uint64_t>{n * (n - 1) / 2, n, n - 2})) << "sums wrap";
  EXPECT_EQ(max, (std::vector<uint64_t>{n - 1, n}));
  EXPECT_EQ(exclusive, (std::vector<uint64_t>{(uint64_t{1} << n) - 1, n % 2 * 5}));
  group.all_reduce({}, Group::Op::kSum, far());
}

inline void broadcast_copies_from_any_root(Group& group) {
  for (int root = 0; root < group.size(); ++root) {
    std::vector<std::byte> bytes(1000, std::byte(group.rank()));
    group.broadcast(bytes, root, far());
    EXPECT_EQ(bytes, std::vector<std::byte>(1000, std::byte(root)));
    group.broadcast({}, root, far());
  }
}

inline void blocks_arrive_in_order(Group& group) {
  for (int from = 0; from < group.size(); ++from) {
    for (int to = 0; to < group.size(); ++to) {
      if (from == to) continue;
      for (const int value : {7, 8}) {
        std::vector<std::byte> bytes(static_cast<size_t>(100 * value), std::byte(value + from));
        if (group.rank() == from) group.send(bytes, to, far());
        if (group.rank() != to) continue;
        std::vector<std::byte> received(bytes.size());
        group.recv(received, from, far());
        EXPECT_EQ(received, bytes);
      }
    }
  }
}

inline void an_empty_block_is_a_block(Group& group) {
  if (group.size() < 2 || group.rank() > 1) return;
  group.rank() == 0 ? group.send({}, 1, far()) : group.recv({}, 0, far());
}

inline void a_rank_has_no_block_for_itself_or_for_nobody(Group& group) {
  for (const int peer : {group.rank(), -1, group.size()}) {
    EXPECT_EQ(caught([&] { group.send({}, peer, far()); }).code, Code::kInvalidArgument);
    EXPECT_EQ(caught([&] { group.recv({}, peer, far()); }).code, Code::kInvalidArgument);
  }
}

inline void broadcast_from_nobody_is_refused_everywhere(Group& group) {
  std::vector<std::byte> bytes(3, std::byte{1});
  for (const int root : {-1, group.size()}) EXPECT_EQ(caught([&] { group.broadcast(bytes, root, far()); }).code, Code::kInvalidArgument);
  EXPECT_EQ(bytes, std::vector<std::byte>(3, std::byte{1}));
}

// --- deadlines; the late rank knows by blocks from the others that they have given up

inline void late_is_late_for_all(Group& group, const std::function<void(Deadline)>& call) {
  if (group.size() < 2) return;
  std::byte token{};
  const int late = group.size() - 1;
  if (group.rank() == late) {
    for (int r = 0; r < late; ++r) group.recv({&token, 1}, r, far());
  }
  const Caught got = caught([&] { call(group.rank() == late ? far() : near()); });
  EXPECT_EQ(got.code, Code::kTimeout) << got.message;
  EXPECT_NE(got.message.find(std::to_string(late)), std::string::npos) << "the late rank is named: " << got.message;
  if (group.rank() != late) group.send({&token, 1}, late, far());
  rounds_do_not_mix(group);
}

inline void a_late_rank_gets_the_others_timeout_and_the_group_goes_on(Group& group) {
  late_is_late_for_all(group, [&](Deadline d) { group.all_gather("", d); });
  std::vector<uint64_t> values{3};
  late_is_late_for_all(group, [&](Deadline d) { group.all_reduce(values, Group::Op::kSum, d); });
  EXPECT_EQ(values[0], 3u) << "a failed reduction changes nothing";
  std::byte byte{};
  late_is_late_for_all(group, [&](Deadline d) { group.broadcast({&byte, 1}, 0, d); });
}

}  // namespace conformance

inline std::vector<Conformance> conformance_cases() {
  using namespace conformance;
#define SHARDOW_CASE(body) \
  { #body, &body }
  return {
      SHARDOW_CASE(all_gather_is_indexed_by_rank),
      SHARDOW_CASE(all_gather_takes_any_bytes_of_any_length),
      SHARDOW_CASE(rounds_do_not_mix),
      SHARDOW_CASE(all_reduce_combines_element_by_element),
      SHARDOW_CASE(broadcast_copies_from_any_root),
      SHARDOW_CASE(blocks_arrive_in_order),
      SHARDOW_CASE(an_empty_block_is_a_block),
      SHARDOW_CASE(a_rank_has_no_block_for_itself_or_for_nobody),
      SHARDOW_CASE(broadcast_from_nobody_is_refused_everywhere),
      SHARDOW_CASE(a_late_rank_gets_the_others_timeout_and_the_group_goes_on),
  };
#undef SHARDOW_CASE
}

}  // namespace shardow::comm
