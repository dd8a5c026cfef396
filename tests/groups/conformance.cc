// The checks of a Group's five calls; those of agree() are in conformance_agree.cc.
#include <algorithm>
#include <exception>

#include "base/errors.h"
#include "findings.h"
#include "group_checks.h"

namespace shardow {
namespace group {

GroupCheck check_of(std::string name, void (*body)(Ranks&, Findings&)) {
  return {std::move(name), [body](Group& group) {
            Findings found;
            try {
              body(ranks_of(group), found);
            } catch (const Error& error) {
              found.expect(false, "threw {}: {}", base::code_name(error.code()), error.what());
            } catch (const std::exception& error) {
              found.expect(false, "threw {}", error.what());
            }
            return found.take();
          }};
}

void check_in_step(Ranks& group, Findings& found) {
  const std::vector<std::string> all = group.all_gather(fmt::format("rank {}", group.rank()), far());
  found.expect(all.size() == static_cast<size_t>(group.size()), "all_gather() gave {} texts of {} ranks", all.size(),
               group.size());
  for (size_t r = 0; r < all.size(); ++r) {
    const std::string expected = fmt::format("rank {}", r);
    found.expect(all[r] == expected, "all_gather() gave '{}' where rank {} said '{}'", all[r].substr(0, 100), r,
                 expected);
  }
}

void check_late(Ranks& group, Findings& found, const std::function<void(Deadline)>& call) {
  if (group.size() < 2) return;
  std::byte token{};
  const int late = group.size() - 1;
  if (group.rank() == late) {
    for (int r = 0; r < late; ++r) group.recv({&token, 1}, r, far());
  }
  const Caught got = caught([&] { call(group.rank() == late ? far() : near()); });
  found.expect(got.thrown, "nothing was thrown where rank {} came after the deadline", late);
  found.expect(!got.thrown || got.code == Code::kTimeout, "{}, not timeout, where rank {} came after the deadline: {}",
               base::code_name(got.code), late, got.message);
  found.expect(!got.thrown || got.message.find(std::to_string(late)) != std::string::npos,
               "rank {} was late and is not named: {}", late, got.message);
  if (group.rank() != late) group.send({&token, 1}, late, far());
  check_in_step(group, found);
}

namespace {

using Bytes = std::vector<std::byte>;

void all_gather_is_indexed_by_rank(Ranks& group, Findings& found) {
  check_in_step(group, found);
}

void all_gather_takes_any_bytes_of_any_length(Ranks& group, Findings& found) {
  const auto of = [](size_t r) {
    return r == 0 ? std::string() : std::string("\0\xff\n", 3) + std::string(r * 5000, '\0');
  };
  const auto all = group.all_gather(of(static_cast<size_t>(group.rank())), far());
  for (size_t r = 0; r < all.size(); ++r) {
    found.expect(all[r] == of(r), "the {} bytes of rank {} arrived as {} bytes, or as others", of(r).size(), r,
                 all[r].size());
  }
}

void rounds_do_not_mix(Ranks& group, Findings& found) {
  for (int round = 0; round < 50; ++round) {
    for (const std::string& one : group.all_gather(std::to_string(round), far()))
      found.expect(one == std::to_string(round), "'{}' arrived in round {}", one.substr(0, 100), round);
  }
}

Ranks::Decision joined(const std::vector<std::string>& everybody) {
  Ranks::Decision made;
  for (const std::string& one : everybody) {
    made.common += one + ";";
    made.each.push_back("for " + one);
  }
  return made;
}

void decide_tells_all_what_one_makes_of_everybodys_words(Ranks& group, Findings& found) {
  const int last = group.size() - 1;
  const std::function<std::string(int)> cases[] = {
      [](int r) { return "rank " + std::to_string(r); },
      [](int) { return std::string("\0\xff alike", 8); },
      [](int r) { return r == 0 ? std::string("of the first alone") : std::string(); },
      [last](int r) { return r == last ? std::string(70000, 'x') : std::string(); },
      [](int r) { return std::string(static_cast<size_t>(r % 8) * 9000 + 1, static_cast<char>('a' + r % 26)); },
  };
  for (const auto& words : cases) {
    std::vector<std::string> all;
    all.reserve(static_cast<size_t>(group.size()));
    for (int r = 0; r < group.size(); ++r) all.push_back(words(r));
    const std::string mine = words(group.rank());
    const Ranks::Met answer = group.decide(mine, joined, far());
    found.expect(answer.common == joined(all).common, "decide() gave '{}' to all", answer.common.substr(0, 100));
    found.expect(answer.own == "for " + mine, "decide() gave '{}' to rank {}", answer.own.substr(0, 100), group.rank());
  }
}

void decide_is_not_asked_where_nobody_has_a_word(Ranks& group, Findings& found) {
  bool asked = false;
  const Ranks::Decide ask = [&](const auto&) {
    asked = true;
    return Ranks::Decision{"asked"};
  };
  const Ranks::Met answer = group.decide("", ask, far());
  found.expect(!asked && answer.common.empty() && answer.own.empty(), "decide() asked what nothing comes to");
}

void what_decide_throws_is_thrown_on_every_rank(Ranks& group, Findings& found) {
  for (const bool alike : {true, false}) {
    const Ranks::Decide refuse = [](const auto& all) -> Ranks::Decision {
      throw Error(Code::kCorrupt, fmt::format("no {}", all.size()));
    };
    const Caught got = caught([&] { group.decide(alike ? "alike" : std::to_string(group.rank()), refuse, far()); });
    found.expect(got.thrown && got.code == Code::kCorrupt && got.message == fmt::format("no {}", group.size()),
                 "decide() threw '{}' where it was refused", got.message);
  }
  check_in_step(group, found);
}

void broadcast_copies_from_any_root(Ranks& group, Findings& found) {
  for (int root = 0; root < group.size(); ++root) {
    Bytes bytes(1000, std::byte(group.rank()));
    group.broadcast(bytes, root, far());
    found.expect(bytes == Bytes(1000, std::byte(root)), "broadcast() from rank {} did not bring its bytes", root);
    group.broadcast({}, root, far());
  }
}

void blocks_arrive_in_order(Ranks& group, Findings& found) {
  for (int from = 0; from < group.size(); ++from) {
    for (int to = 0; to < group.size(); ++to) {
      if (from == to) continue;
      for (const int value : {7, 8}) {
        const Bytes bytes(static_cast<size_t>(100 * value), std::byte(value + from));
        if (group.rank() == from) group.send(bytes, to, far());
        if (group.rank() != to) continue;
        Bytes received(bytes.size());
        group.recv(received, from, far());
        found.expect(received == bytes, "block {} from rank {} to rank {} arrived as another one", value - 6, from, to);
      }
    }
  }
}

void an_empty_block_is_a_block(Ranks& group, Findings&) {
  if (group.size() < 2 || group.rank() > 1) return;
  group.rank() == 0 ? group.send({}, 1, far()) : group.recv({}, 0, far());
}

void refused(Findings& found, const char* what, int peer, const std::function<void()>& call) {
  const Caught got = caught(call);
  found.expect(got.thrown && got.code == Code::kInvalidArgument, "{} rank {} must be invalid_argument, and was {}: {}",
               what, peer, got.thrown ? base::code_name(got.code) : "accepted", got.message);
}

void a_rank_has_no_block_for_itself_or_for_nobody(Ranks& group, Findings& found) {
  for (const int peer : {group.rank(), -1, group.size()}) {
    refused(found, "send() to", peer, [&] { group.send({}, peer, far()); });
    refused(found, "recv() from", peer, [&] { group.recv({}, peer, far()); });
  }
}

void broadcast_from_nobody_is_refused_everywhere(Ranks& group, Findings& found) {
  Bytes bytes(3, std::byte{1});
  for (const int root : {-1, group.size()})
    refused(found, "broadcast() from", root, [&] { group.broadcast(bytes, root, far()); });
  found.expect(bytes == Bytes(3, std::byte{1}), "a refused broadcast() changed its bytes");
}

void a_late_rank_gets_the_others_timeout_and_the_group_goes_on(Ranks& group, Findings& found) {
  check_late(group, found, [&](Deadline deadline) { group.all_gather("", deadline); });
  for (const char* const words : {"", "some"})
    check_late(group, found, [&](Deadline deadline) { group.decide(words, joined, deadline); });
  std::byte byte{};
  check_late(group, found, [&](Deadline deadline) { group.broadcast({&byte, 1}, 0, deadline); });
}

}  // namespace
}  // namespace group

std::vector<GroupCheck> group_checks() {
  using namespace group;
#define SHARDOW_CHECK(body) check_of(#body, body)
  std::vector<GroupCheck> checks = {
      SHARDOW_CHECK(all_gather_is_indexed_by_rank),
      SHARDOW_CHECK(all_gather_takes_any_bytes_of_any_length),
      SHARDOW_CHECK(rounds_do_not_mix),
      SHARDOW_CHECK(decide_tells_all_what_one_makes_of_everybodys_words),
      SHARDOW_CHECK(decide_is_not_asked_where_nobody_has_a_word),
      SHARDOW_CHECK(what_decide_throws_is_thrown_on_every_rank),
      SHARDOW_CHECK(broadcast_copies_from_any_root),
      SHARDOW_CHECK(blocks_arrive_in_order),
      SHARDOW_CHECK(an_empty_block_is_a_block),
      SHARDOW_CHECK(a_rank_has_no_block_for_itself_or_for_nobody),
      SHARDOW_CHECK(broadcast_from_nobody_is_refused_everywhere),
      SHARDOW_CHECK(a_late_rank_gets_the_others_timeout_and_the_group_goes_on),
  };
#undef SHARDOW_CHECK
  for (GroupCheck& one : agree_checks()) checks.push_back(std::move(one));
  return checks;
}

}  // namespace shardow
