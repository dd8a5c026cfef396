// For tests: what agree() must do over every Group; see conformance.h.
#pragma once

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/errors.h"
#include "comm/agree.h"
#include "comm/conformance.h"
#include "shardow/group.h"

namespace shardow::comm {
namespace conformance {

inline void agree_runs_fn_once_on_every_rank(Group& group) {
  uint64_t calls = 0;
  agree(group, far(), [&] { ++calls; });
  EXPECT_EQ(calls, 1u);
  group.all_reduce({&calls, 1}, Group::Op::kSum, far());
  EXPECT_EQ(calls, static_cast<uint64_t>(group.size()));
}

/// `failing(rank)` throw Error{kCorrupt, "file of rank <r>"}; checks what each rank gets, and that the group works on.
inline void check_agree(Group& group, const std::function<bool(int)>& failing) {
  std::vector<int> failed;
  for (int r = 0; r < group.size(); ++r) {
    if (failing(r)) failed.push_back(r);
  }
  const std::string own = fmt::format("file of rank {}", group.rank());
  const Caught got = caught([&] {
    agree(group, far(), [&] {
      if (failing(group.rank())) throw Error(Code::kCorrupt, own);
    });
  });
  ASSERT_TRUE(got.thrown);
  EXPECT_EQ(got.code, Code::kCorrupt) << "one code for all";
  if (failing(group.rank())) {
    EXPECT_EQ(got.message, own);
  } else {
    const std::string first = fmt::format("file of rank {}", failed.front());
    EXPECT_EQ(got.message, failed.size() == 1 ? fmt::format("rank {} of {} failed: {}", failed[0], group.size(), first)
                                              : fmt::format("ranks {} of {} failed; rank {}: {}", fmt::join(failed, ", "), group.size(),
                                                            failed[0], first));
  }
  all_gather_is_indexed_by_rank(group);
}

inline void agree_makes_one_ranks_error_everybodys(Group& group) {
  for (int bad = 0; bad < group.size(); ++bad) check_agree(group, [bad](int r) { return r == bad; });
}

inline void agree_names_all_ranks_that_failed(Group& group) {
  check_agree(group, [](int r) { return r % 2 == 0; });
  check_agree(group, [n = group.size()](int r) { return r == n - 1 || r == n / 2; });
}

inline void agree_leaves_every_rank_its_own_error_when_all_fail(Group& group) {
  check_agree(group, [](int) { return true; });
}

inline void agree_carries_exceptions_of_any_type(Group& group) {
  const int last = group.size() - 1;
  const Caught standard = caught([&] {
    try {
      agree(group, far(), [&] {
        if (group.rank() == last) throw std::out_of_range("index 9");
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::out_of_range& error) {
      EXPECT_EQ(group.rank(), last);
      EXPECT_STREQ(error.what(), "index 9");
    }
  });
  if (group.rank() != last) {
    EXPECT_EQ(standard.code, Code::kPeerFailed);
    EXPECT_EQ(standard.message, fmt::format("rank {} of {} failed: index 9", last, group.size()));
  }
  const Caught other = caught([&] {
    try {
      agree(group, far(), [&] {
        if (group.rank() == last) throw 42;
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (int value) {
      EXPECT_EQ(group.rank(), last);
      EXPECT_EQ(value, 42);
    }
  });
  if (group.rank() != last) {
    EXPECT_EQ(other.code, Code::kPeerFailed);
  }
}

inline void agree_carries_errno(Group& group) {
  const int last = group.size() - 1;
  try {
    agree(group, far(), [&] {
      if (group.rank() == last) throw Error(Code::kOutOfSpace, "the disk of one", ENOSPC);
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kOutOfSpace);
    EXPECT_EQ(error.os_errno(), ENOSPC);
  }
}

inline void agree_takes_an_error_of_the_file_system_for_what_it_means(Group& group) {
  const Caught got = caught([&] {
    agree(group, far(), [&] {
      if (group.rank() == 0)
        throw std::filesystem::filesystem_error("status", "a", std::make_error_code(std::errc::too_many_symbolic_link_levels));
    });
  });
  EXPECT_EQ(got.code, Code::kIo) << got.message;
}

/// A rank that waited in vain learns of the failure that made it wait, whatever its type.
inline void what_is_about_others_gives_way_to_what_they_say(Group& group) {
  const int last = group.size() - 1;
  for (const bool foreign : {false, true}) {
    for (const Code waited : {Code::kTimeout, Code::kPeerFailed}) {
      const Caught got = caught([&] {
        try {
          agree(group, far(), [&] {
            if (group.rank() < last) throw Error(waited, "nothing came");
            if (foreign) throw std::out_of_range("index 9");
            throw Error(Code::kCorrupt, "not what was saved");
          });
        } catch (const std::out_of_range&) {
          EXPECT_TRUE(foreign && group.rank() == last);
          throw Error(Code::kPeerFailed, "index 9");
        }
      });
      EXPECT_EQ(got.code, foreign ? Code::kPeerFailed : Code::kCorrupt);
      EXPECT_NE(got.message.find(foreign ? "index 9" : "not what was saved"), std::string::npos) << got.message;
    }
  }
  const Caught all = caught([&] { agree(group, far(), [&] { throw Error(Code::kTimeout, fmt::format("of rank {}", group.rank())); }); });
  EXPECT_EQ(all.code, Code::kTimeout);
  EXPECT_NE(all.message.find("of rank 0"), std::string::npos) << all.message;
}

/// A step that took longer than its deadline is told all the same, and what each rank returned arrives.
inline void agree_tells_after_the_deadline_and_what_was_returned(Group& group) {
  const Deadline passed = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  const std::vector<std::string> all = agree_on(group, passed, [&] {
    std::this_thread::sleep_until(passed + std::chrono::milliseconds(5));
    return fmt::format("of {}", group.rank());
  });
  for (int rank = 0; rank < group.size(); ++rank) EXPECT_EQ(all.at(static_cast<size_t>(rank)), fmt::format("of {}", rank));
}

inline void agree_takes_an_empty_message_for_a_failure(Group& group) {
  EXPECT_TRUE(caught([&] {
                agree(group, far(), [&] {
                  if (group.rank() == 0) throw Error(Code::kIo, "");
                });
              }).thrown);
}

inline void agree_shortens_long_messages_between_characters(Group& group) {
  std::string message = "x";
  while (message.size() < 10000) message += "\xc3\xa9";  // one character of two bytes
  const Caught got = caught([&] {
    agree(group, far(), [&] {
      if (group.rank() == 0) throw Error(Code::kIo, message);
    });
  });
  if (group.rank() == 0) return;
  EXPECT_LT(got.message.size(), 4200u);
  const std::string whole = fmt::format("rank 0 of {} failed: {}", group.size(), message);
  ASSERT_EQ(got.message.substr(got.message.size() - 3), "...");
  const std::string kept = got.message.substr(0, got.message.size() - 3);
  EXPECT_EQ(kept, whole.substr(0, kept.size()));
  EXPECT_NE(whole[kept.size()], '\xa9') << "half a character was kept";
}

inline void agree_times_out_together(Group& group) {
  late_is_late_for_all(group, [&](Deadline d) { agree(group, d, [] {}); });
}

inline void an_own_error_outlives_the_timeout_of_agree(Group& group) {
  if (group.size() < 2) return;
  std::byte token{};
  const int late = group.size() - 1;
  if (group.rank() == late) {
    for (int r = 0; r < late; ++r) group.recv({&token, 1}, r, far());
  }
  const Caught got = caught([&] {
    agree(group, group.rank() == late ? far() : near(), [&] {
      if (group.rank() == 0) throw Error(Code::kIo, "no disk");
    });
  });
  EXPECT_EQ(got.code, group.rank() == 0 ? Code::kIo : Code::kTimeout) << got.message;
  if (group.rank() != late) group.send({&token, 1}, late, far());
}

}  // namespace conformance

inline std::vector<Conformance> agree_cases() {
  using namespace conformance;
#define SHARDOW_CASE(body) \
  { #body, &body }
  return {
      SHARDOW_CASE(agree_runs_fn_once_on_every_rank),
      SHARDOW_CASE(agree_makes_one_ranks_error_everybodys),
      SHARDOW_CASE(agree_names_all_ranks_that_failed),
      SHARDOW_CASE(agree_leaves_every_rank_its_own_error_when_all_fail),
      SHARDOW_CASE(agree_carries_exceptions_of_any_type),
      SHARDOW_CASE(agree_carries_errno),
      SHARDOW_CASE(agree_takes_an_error_of_the_file_system_for_what_it_means),
      SHARDOW_CASE(what_is_about_others_gives_way_to_what_they_say),
      SHARDOW_CASE(agree_tells_after_the_deadline_and_what_was_returned),
      SHARDOW_CASE(agree_takes_an_empty_message_for_a_failure),
      SHARDOW_CASE(agree_shortens_long_messages_between_characters),
      SHARDOW_CASE(agree_times_out_together),
      SHARDOW_CASE(an_own_error_outlives_the_timeout_of_agree),
  };
#undef SHARDOW_CASE
}

}  // namespace shardow::comm
