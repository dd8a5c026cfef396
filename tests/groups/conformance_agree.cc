// The checks of agree() over a Group.
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "base/errors.h"
#include "findings.h"
#include "group/agree.h"

namespace shardow::group {
namespace {

void expect_error(Findings& found, const Caught& got, Code code, std::string_view says) {
  found.expect(got.thrown, "agree() threw nothing where '{}' was thrown", says);
  if (!got.thrown) return;
  found.expect(got.code == code, "agree() threw {}, not {}: {}", base::code_name(got.code), base::code_name(code),
               got.message);
  found.expect(got.message.find(says) != std::string::npos, "agree() said '{}', without '{}'", got.message, says);
}

void agree_runs_fn_once_on_every_rank(Ranks& group, Findings& found) {
  uint64_t calls = 0;
  agree(group, far(), [&] { ++calls; });
  found.expect(calls == 1, "fn ran {} times", calls);
  const auto by_rank = group.all_gather(std::to_string(calls), far());
  calls = std::accumulate(by_rank.begin(), by_rank.end(), uint64_t{0},
                          [](uint64_t sum, const std::string& own) { return sum + std::stoull(own); });
  found.expect(calls == static_cast<uint64_t>(group.size()), "fn ran {} times on {} ranks", calls, group.size());
}

/// `failing(rank)` throw Error{kCorrupt, "file of rank <r>"}; checks what each rank gets, and that the group works on.
void check_agree(Ranks& group, Findings& found, const std::function<bool(int)>& failing) {
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
  const std::string first = fmt::format("file of rank {}", failed.front());
  const std::string of_others =
      failed.size() == 1
          ? fmt::format("rank {} of {} failed: {}", failed[0], group.size(), first)
          : fmt::format("ranks {} of {} failed; rank {}: {}", fmt::join(failed, ", "), group.size(), failed[0], first);
  const std::string& expected = failing(group.rank()) ? own : of_others;
  expect_error(found, got, Code::kCorrupt, expected);
  found.expect(got.message == expected, "agree() said '{}', not '{}'", got.message, expected);
  check_in_step(group, found);
}

void agree_makes_one_ranks_error_everybodys(Ranks& group, Findings& found) {
  for (int bad = 0; bad < group.size(); ++bad) check_agree(group, found, [bad](int r) { return r == bad; });
}

void agree_names_all_ranks_that_failed(Ranks& group, Findings& found) {
  check_agree(group, found, [](int r) { return r % 2 == 0 && r < 64; });
  check_agree(group, found, [n = group.size()](int r) { return r == n - 1 || r == n / 2; });
}

void agree_leaves_every_rank_its_own_error_when_all_fail(Ranks& group, Findings& found) {
  check_agree(group, found, [](int) { return true; });
}

/// The last rank throws `thrown`, which agree() must leave as it is there, and make kPeerFailed of elsewhere.
template <typename Thrown>
void check_foreign(Ranks& group, Findings& found, const Thrown& thrown, std::string_view says) {
  const int last = group.size() - 1;
  bool own = false;
  const Caught got = caught([&] {
    try {
      agree(group, far(), [&] {
        if (group.rank() == last) throw Thrown(thrown);
      });
    } catch (const Thrown&) {
      own = true;
    }
  });
  found.expect(own == (group.rank() == last), "the exception of another type was thrown {}",
               own ? "on another rank" : "as another one where it came from");
  if (group.rank() != last) expect_error(found, got, Code::kPeerFailed, says);
}

void agree_carries_exceptions_of_any_type(Ranks& group, Findings& found) {
  check_foreign(group, found, std::out_of_range("index 9"),
                fmt::format("rank {} of {} failed: index 9", group.size() - 1, group.size()));
  check_foreign(group, found, 42, fmt::format("rank {}", group.size() - 1));
}

void agree_carries_errno(Ranks& group, Findings& found) {
  try {
    agree(group, far(), [&] {
      if (group.rank() == group.size() - 1) throw Error(Code::kOutOfSpace, "the disk of one", ENOSPC);
    });
    found.expect(false, "agree() threw nothing where a rank had no space");
  } catch (const Error& error) {
    found.expect(error.code() == Code::kOutOfSpace && error.os_errno() == ENOSPC,
                 "out_of_space with errno {} arrived as {} with {}", ENOSPC, base::code_name(error.code()),
                 error.os_errno());
  }
}

void agree_takes_an_error_of_the_file_system_for_what_it_means(Ranks& group, Findings& found) {
  const Caught got = caught([&] {
    agree(group, far(), [&] {
      if (group.rank() == 0)
        throw std::filesystem::filesystem_error("status", "a",
                                                std::make_error_code(std::errc::too_many_symbolic_link_levels));
    });
  });
  expect_error(found, got, Code::kIo, "");
}

/// A rank that waited in vain learns of the failure that made it wait, whatever its type.
void what_is_about_others_gives_way_to_what_they_say(Ranks& group, Findings& found) {
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
          found.expect(foreign && group.rank() == last, "the exception of another type was thrown on another rank");
          throw Error(Code::kPeerFailed, "index 9");
        }
      });
      expect_error(found, got, foreign ? Code::kPeerFailed : Code::kCorrupt,
                   foreign ? "index 9" : "not what was saved");
    }
  }
  const Caught all = caught(
      [&] { agree(group, far(), [&] { throw Error(Code::kTimeout, fmt::format("of rank {}", group.rank())); }); });
  expect_error(found, all, Code::kTimeout, "of rank 0");
}

/// A step that took longer than its deadline is told all the same, and what each rank returned arrives.
void agree_tells_after_the_deadline_and_what_was_returned(Ranks& group, Findings& found) {
  const Deadline passed = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  const auto late = [&] {
    std::this_thread::sleep_until(passed + std::chrono::milliseconds(5));
    return fmt::format("of {};", group.rank());
  };
  std::string expected;
  for (int r = 0; r < group.size(); ++r) expected += fmt::format("of {};", r);
  const std::string all = agree_on(
      group, [&] { return passed; }, late, [](const auto& told) { return fmt::format("{}", fmt::join(told, "")); });
  found.expect(all == expected, "'{}' arrived, not '{}'", all, expected);
}

void agree_takes_an_empty_message_for_a_failure(Ranks& group, Findings& found) {
  const Caught got = caught([&] {
    agree(group, far(), [&] {
      if (group.rank() == 0) throw Error(Code::kIo, "");
    });
  });
  expect_error(found, got, Code::kIo, "");
}

void agree_shortens_long_messages_between_characters(Ranks& group, Findings& found) {
  std::string message = "x";
  while (message.size() < 10000) message += "\xc3\xa9";  // one character of two bytes
  const Caught got = caught([&] {
    agree(group, far(), [&] {
      if (group.rank() == 0) throw Error(Code::kIo, message);
    });
  });
  if (group.rank() == 0) return;
  const std::string whole = fmt::format("rank 0 of {} failed: {}", group.size(), message);
  const size_t kept = std::max<size_t>(got.message.size(), 3) - 3;
  found.expect(got.message.size() < 4200 && got.message.ends_with("..."), "a long message arrived with {} bytes",
               got.message.size());
  found.expect(whole.starts_with(got.message.substr(0, kept)) && whole[std::min(kept, whole.size() - 1)] != '\xa9',
               "a long message was not cut between two characters");
}

/// Counts what is asked of a Group.
class Counted final : public Ranks {
  template <typename Fn>
  auto counted(size_t bytes, Fn fn) {
    ++calls;
    sent += bytes;
    return fn();
  }

 public:
  explicit Counted(Ranks& group) : group_(group) {}
  int calls = 0;
  size_t sent = 0;

  int rank() const noexcept override { return group_.rank(); }
  int size() const noexcept override { return group_.size(); }
  void begin(std::string_view, std::chrono::milliseconds) override {}
  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    return counted(mine.size(), [&] { return group_.all_gather(mine, deadline); });
  }
  Met decide(std::string_view mine, const Decide& decide, Deadline deadline) override {
    return counted(mine.size(), [&] { return group_.decide(mine, decide, deadline); });
  }
  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    counted(bytes.size(), [&] { group_.broadcast(bytes, root, deadline); });
  }
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    counted(bytes.size(), [&] { group_.send(bytes, to, deadline); });
  }
  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    counted(bytes.size(), [&] { group_.recv(bytes, from, deadline); });
  }

 private:
  Ranks& group_;
};

void agree_is_one_call_and_only_who_fails_has_words(Ranks& group, Findings& found) {
  for (const int bad : {-1, group.size() - 1}) {
    Counted counted(group);
    const Caught got = caught([&] {
      agree(counted, far(), [&] {
        if (group.rank() == bad) throw Error(Code::kIo, "no disk");
      });
    });
    found.expect(got.thrown == (bad >= 0), "agree() threw '{}'", got.message);
    found.expect(counted.calls == 1, "agree() made {} calls", counted.calls);
    found.expect(counted.sent < (group.rank() == bad ? 100u : 1u), "agree() sent {} bytes", counted.sent);
  }
}

void agree_times_out_together(Ranks& group, Findings& found) {
  check_late(group, found, [&](Deadline deadline) { agree(group, deadline, [] {}); });
}

void an_own_error_outlives_the_timeout_of_agree(Ranks& group, Findings& found) {
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
  expect_error(found, got, group.rank() == 0 ? Code::kIo : Code::kTimeout, "");
  if (group.rank() != late) group.send({&token, 1}, late, far());
}

}  // namespace

std::vector<GroupCheck> agree_checks() {
#define SHARDOW_CHECK(body) check_of(#body, body)
  return {
      SHARDOW_CHECK(agree_runs_fn_once_on_every_rank),
      SHARDOW_CHECK(agree_makes_one_ranks_error_everybodys),
      SHARDOW_CHECK(agree_names_all_ranks_that_failed),
      SHARDOW_CHECK(agree_leaves_every_rank_its_own_error_when_all_fail),
      SHARDOW_CHECK(agree_carries_exceptions_of_any_type),
      SHARDOW_CHECK(agree_carries_errno),
      SHARDOW_CHECK(agree_takes_an_error_of_the_file_system_for_what_it_means),
      SHARDOW_CHECK(what_is_about_others_gives_way_to_what_they_say),
      SHARDOW_CHECK(agree_tells_after_the_deadline_and_what_was_returned),
      SHARDOW_CHECK(agree_takes_an_empty_message_for_a_failure),
      SHARDOW_CHECK(agree_shortens_long_messages_between_characters),
      SHARDOW_CHECK(agree_is_one_call_and_only_who_fails_has_words),
      SHARDOW_CHECK(agree_times_out_together),
      SHARDOW_CHECK(an_own_error_outlives_the_timeout_of_agree),
  };
#undef SHARDOW_CHECK
}

}  // namespace shardow::group
