// One decide(). A rank with nothing to tell sends nothing: no word means that its step went well and returned nothing.
// Who sums up looks at everybody's statuses, and says in one answer for all:
//
//   1. nobody threw: what their words come to
//   2. somebody did: the error of the first rank whose error is its own; where all are about others (kTimeout,
//   kPeerFailed), of the first
//   3. a rank that threw keeps its exception, unless that is about others: then the verdict says more
#include "group/agree.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "base/turns.h"
#include "group/ranks.h"
#include "group/wire.h"

namespace shardow {
namespace group {
namespace {

constexpr size_t kLongestMessage = 4096;  // a status is a fact, and travels to every rank
constexpr int64_t kNothingThrown = -1;
constexpr std::chrono::milliseconds kToTell{
    1000};  // that a rank has at least, when its step is done, to tell the others

/// Cut between characters of UTF-8.
std::string shortened(std::string message) {
  if (message.size() <= kLongestMessage) return message;
  size_t end = kLongestMessage;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xc0) == 0x80) --end;
  message.resize(end);
  return message + "...";
}

/// What a rank that waits for a dead or late one gets, which differs from rank to rank.
bool is_about_others(Code code) {
  return code == Code::kTimeout || code == Code::kPeerFailed;
}

/// How the step went here.
struct Outcome {
  std::string status;
  std::exception_ptr thrown;
  bool about_others = false;
};

std::string failure(Code code, bool about_others, int error, const std::string& message) {
  Sender out;
  out.number(static_cast<int64_t>(code));
  out.number(about_others ? 1 : 0);
  out.number(error);
  out.text(shortened(message));
  return out.bytes();
}

Outcome outcome_of(const std::function<std::string()>& fn) {
  try {
    const std::string words = base::in_our_words(fn);
    if (words.empty()) return {};
    Sender out;
    out.number(kNothingThrown);
    out.text(words);
    return {out.bytes(), nullptr};
  } catch (const Error& error) {
    const bool about_others = is_about_others(error.code());
    return {failure(error.code(), about_others, error.os_errno(), error.what()), std::current_exception(),
            about_others};
  } catch (const std::exception& error) {
    return {failure(Code::kPeerFailed, false, 0, error.what()), std::current_exception()};
  } catch (...) {
    return {failure(Code::kPeerFailed, false, 0, "an exception that is no std::exception"), std::current_exception()};
  }
}

struct Failed {
  int rank;
  Code code;
  bool about_others;
  int error;
  std::string message;
};

/// Reads what all ranks returned, and who threw.
std::pair<std::vector<std::string>, std::vector<Failed>> read(const std::vector<std::string>& statuses) {
  std::vector<std::string> returned;
  std::vector<Failed> failed;
  for (const std::string& status : statuses) {
    Receiver in(status);
    const int64_t code = status.empty() ? kNothingThrown : in.number();
    if (code == kNothingThrown) {
      returned.push_back(status.empty() ? std::string() : in.text());
    } else {
      const bool about_others = in.number() != 0;
      const auto error = static_cast<int>(in.number());
      failed.push_back(
          {static_cast<int>(returned.size() + failed.size()), static_cast<Code>(code), about_others, error, in.text()});
    }
  }
  return {std::move(returned), std::move(failed)};
}

/// The one whose error is everybody's.
const Failed& first_of(const std::vector<Failed>& failed) {
  const auto own = std::find_if(failed.begin(), failed.end(), [](const Failed& one) { return !one.about_others; });
  return own == failed.end() ? failed.front() : *own;
}

std::string everybodys(const std::vector<Failed>& failed, size_t size) {
  constexpr size_t kMostNamed = 64;
  const Failed& first = first_of(failed);
  std::vector<int> ranks;
  for (size_t i = 0; i < std::min(failed.size(), kMostNamed); ++i) ranks.push_back(failed[i].rank);
  const std::string more = failed.size() > kMostNamed ? fmt::format(" and {} more", failed.size() - kMostNamed) : "";
  return failed.size() == 1 ? fmt::format("rank {} of {} failed: {}", first.rank, size, first.message)
                            : fmt::format("ranks {}{} of {} failed; rank {}: {}", fmt::join(ranks, ", "), more, size,
                                          first.rank, first.message);
}

/// (1), (2)
std::string verdict(const std::vector<std::string>& statuses, const SumUp& sum_up) {
  const auto [returned, failed] = read(statuses);
  Sender out;
  if (failed.empty()) {
    out.number(kNothingThrown);
    out.text(sum_up(returned));
    return out.bytes();
  }
  const Failed& first = first_of(failed);
  out.number(static_cast<int64_t>(first.code));
  out.number(first.rank);
  out.number(first.error);
  out.text(everybodys(failed, statuses.size()));
  return out.bytes();
}

}  // namespace

std::string agree_on(Group& group, Deadline deadline, const std::function<std::string()>& fn, const SumUp& sum_up) {
  const auto begin = base::now();
  const Outcome mine = outcome_of(fn);
  // A rank whose step waited for another in vain does not wait a second time as long.
  const Deadline to_tell = base::now() + std::min<Deadline::duration>(std::max(deadline - begin, {}), kToTell);
  std::string said;
  try {
    const auto decide = [&](const std::vector<std::string>& all) { return Ranks::Decision{verdict(all, sum_up)}; };
    said = ranks_of(group).decide(mine.status, decide, std::max(deadline, to_tell)).common;
  } catch (...) {
    if (mine.thrown && !mine.about_others)
      std::rethrow_exception(mine.thrown);  // says more than that nobody could be told
    throw;
  }
  if (said.empty()) return said;
  Receiver in(said);
  const int64_t code = in.number();
  if (code == kNothingThrown) return in.text();
  const bool is_first = in.number() == group.rank();
  if (mine.thrown && (is_first || !mine.about_others)) std::rethrow_exception(mine.thrown);  // (3)
  const auto error = static_cast<int>(in.number());
  throw Error(static_cast<Code>(code), in.text(), error);
}

}  // namespace group

void agree(Group& group, Deadline deadline, const std::function<void()>& fn) {
  const auto step = [&] {
    fn();
    return std::string();
  };
  group::agree_on(group, deadline, step, [](const auto&) { return std::string(); });
}

}  // namespace shardow
