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

#include "base/errors.h"
#include "base/files.h"
#include "base/turns.h"
#include "group/ranks.h"
#include "group/rounds.h"
#include "group/wire.h"

namespace shardow {
namespace group {
namespace {

constexpr size_t kLongestMessage = 4096;  // a status is a fact, and travels to every rank
constexpr int64_t kNothingThrown = -1;

/// Cut between characters of UTF-8.
std::string shortened(std::string message) {
  if (message.size() <= kLongestMessage) return message;
  size_t end = kLongestMessage;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xc0) == 0x80) --end;
  message.resize(end);
  return message + "...";
}

/// How the step went here.
struct Outcome {
  std::string status;
  std::exception_ptr thrown = nullptr;
  bool about_others = false;
};

/// Makes the outcome of an exception that is being handled.
Outcome failed(Code code, const std::string& message, bool about_others = false, int error = 0) {
  const std::string status =
      numbers_and_text({static_cast<int64_t>(code), about_others ? 1 : 0, error}, shortened(message));
  return {status, std::current_exception(), about_others};
}

Outcome outcome_of(const std::function<std::string()>& fn) {
  try {
    const std::string words = base::in_our_words(fn);
    return {words.empty() ? "" : numbers_and_text({kNothingThrown}, words)};
  } catch (const Interruption&) {
    throw;
  } catch (const Error& error) {
    return failed(error.code(), error.what(), is_about_others(error.code()), error.os_errno());
  } catch (const std::exception& error) {
    return failed(Code::kPeerFailed, error.what());
  } catch (...) {
    return failed(Code::kPeerFailed, "an exception that is no std::exception");
  }
}

struct Failed {
  int rank;
  Code code;
  bool about_others;
  int error;
  std::string message;
};

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
std::string summed_up(const std::vector<std::string>& statuses, const SumUp& sum_up) {
  std::vector<std::string> returned;
  std::vector<Failed> failed;
  for (const std::string& status : statuses) {
    Receiver in(status);
    const int64_t code = status.empty() ? kNothingThrown : in.number();
    if (code == kNothingThrown) {
      returned.push_back(status.empty() ? std::string() : in.text());
    } else {
      const auto rank = static_cast<int>(returned.size() + failed.size());
      const bool about_others = in.number() != 0;
      const auto error = static_cast<int>(in.number());
      failed.push_back({rank, static_cast<Code>(code), about_others, error, in.text()});
    }
  }
  if (failed.empty()) return sum_up(returned);
  const Failed& first = first_of(failed);
  throw Error(first.code, everybodys(failed, statuses.size()), first.error);
}

}  // namespace

std::string agree_on(Group& group, const std::function<Deadline()>& deadline, const std::function<std::string()>& fn,
                     const SumUp& sum_up) {
  const Deadline begun = base::now(), first = deadline();
  const Outcome own = outcome_of(fn);
  // A rank whose step waited for another in vain does not wait a second time as long.
  const Deadline to_tell = base::now() + std::min<Deadline::duration>(std::max(first - begun, {}), kToTell);
  const Deadline until = std::max(own.about_others ? first : deadline(), to_tell);
  const auto decide = [&](const std::vector<std::string>& all) { return Ranks::Decision{summed_up(all, sum_up)}; };
  try {
    return ranks_of(group).decide(own.status, decide, until).common;
  } catch (...) {
    if (own.thrown && (!own.about_others || group.size() == 1)) std::rethrow_exception(own.thrown);  // (3)
    throw;
  }
}

}  // namespace group

void agree(Group& group, Deadline deadline, const std::function<void()>& fn) {
  const auto step = [&] {
    fn();
    return std::string();
  };
  group::agree_on(
      group, [&] { return deadline; }, step, [](const auto&) { return std::string(); });
}

}  // namespace shardow
