// One member of each lane is the keeper of its rounds: rank 0 of collectives, the sender of blocks. A round is complete
// only when every member has promised to wait for the keeper's verdict, and a member promises only when it knows that
// the keeper has come. So whoever has not promised can give up by itself at its deadline, and nobody is left with a
// success that others don't have:
//
//   1. the keeper comes, and tells the others (kHere)
//   2. a member that has come, and knows that, sends its bytes, which is its promise (kJoin)
//   3. when all have joined the keeper sends everybody's bytes, and is done when they are on their way (kVerdict)
//   4. at its deadline, or where a member is gone, the keeper sends that as the verdict; a member that promised asks it
//   to (kHurry)
//   5. a member that has not promised gives up by itself, and tells all others why, so that they don't wait either
//   (kRefuse). A keeper that
//      comes then sends that on as the verdict
//
// Rounds of a lane are counted by each rank; a letter waits for this rank to come to its round, and one of a round that
// is over is dropped.
//
// What no protocol can: where the keeper dies or stands still after (2), members don't know how it decided. They wait
// kGrace longer, and fail; if it lives on, and had all joins, it takes the round for complete. The ranks are in step
// again in the next round.
#include "mpi/star.h"

#include <fmt/chrono.h>
#include <sched.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "comm/wire.h"

namespace shardow::over_mpi {

using comm::Failure;
using Lane = Meeting::Lane;

enum class Star::Word : int64_t { kHere, kJoin, kHurry, kRefuse, kVerdict };

struct Star::Turn {
  const Lane& lane;
  const uint64_t number;
  const std::string call;
  const Deadline deadline;
  Round& round;
  std::string bytes;  // given away when this rank joins

  int keeper() const { return lane.members.front(); }
  std::vector<int> missing() const {  // as the keeper knows
    std::vector<int> ranks;
    for (size_t i = 0; i < round.offers.size(); ++i) {
      if (!round.offers[i]) ranks.push_back(lane.members[i]);
    }
    return ranks;
  }
};

namespace {

constexpr int64_t kComplete = -1;   // in place of a code
constexpr int64_t kEverybody = -1;  // in place of the sender of a block

/// Between looks at the mail: at first the processor is lent to whoever waits for it, then it is left alone.
class Pause {
 public:
  void again() { looks_ = 0; }
  void operator()(Deadline until) {
    if (++looks_ < 100) {
      sched_yield();
    } else {
      const auto rest = std::chrono::microseconds(std::min(50 * (looks_ / 100), 500));
      std::this_thread::sleep_until(std::min(until, std::chrono::steady_clock::now() + rest));
    }
  }

 private:
  int looks_ = 0;
};

bool passed(Deadline deadline) {
  return std::chrono::steady_clock::now() >= deadline;
}

size_t position(const Lane& lane, int rank) {
  return static_cast<size_t>(std::find(lane.members.begin(), lane.members.end(), rank) - lane.members.begin());
}

}  // namespace

std::shared_ptr<const Star::Bytes> Star::meet(const Lane& lane, Offer offer, Deadline deadline) {
  Rounds& rounds = rounds_[lane];
  const uint64_t number = rounds.ended;
  const std::string call = offer.call;
  Turn turn{lane, number, call, deadline, rounds.open[number], std::move(offer.bytes)};
  const bool keeps = turn.keeper() == rank();
  if (keeps) {
    turn.round.offers.resize(lane.members.size());
    turn.round.offers[position(lane, rank())] = std::move(turn.bytes);
    tell_others(turn, Word::kHere, std::nullopt, {});
  }
  Pause pause;
  while (true) {
    const bool late = passed(deadline);  // before looking: what has come by then counts
    if (read_letters()) pause.again();
    keeps ? keep(turn) : follow(turn);
    if (late && !turn.round.verdict) keeps ? decide(turn, comm::did_not_come(call, turn.missing())) : give_up(turn);
    if (turn.round.verdict) break;
    pause(late ? beyond(deadline) : deadline);
  }
  const Verdict verdict = std::move(*turn.round.verdict);
  rounds.open.erase(number);
  rounds.ended = number + 1;
  see_off(std::chrono::steady_clock::now() + (keeps && !verdict.failure ? grace_ : std::chrono::milliseconds(20)));
  if (verdict.failure) throw Error(verdict.failure->code, verdict.failure->message);
  return verdict.bytes;
}

/// `deadline` may be as far as time goes.
Deadline Star::beyond(Deadline deadline) const {
  return deadline > Deadline::max() - grace_ ? deadline : deadline + grace_;
}

/// (3) and (4), of the keeper.
void Star::keep(Turn& turn) {
  Round& round = turn.round;
  if (round.refusal) return decide(turn, round.refusal);
  if (std::all_of(round.offers.begin(), round.offers.end(), [](const auto& offer) { return offer.has_value(); }))
    return decide(turn, std::nullopt);
  if (const std::optional<int> gone = gone_before_it_came(turn)) return decide(turn, comm::is_gone(turn.call, *gone));
  if (round.hurried) decide(turn, comm::did_not_come(turn.call, turn.missing()));
}

/// (2) and (5), of the others.
void Star::follow(Turn& turn) {
  Round& round = turn.round;
  if (round.verdict) return;
  if (gone_[static_cast<size_t>(turn.keeper())]) {
    round.verdict = {comm::is_gone(turn.call, turn.keeper()), nullptr};
  } else if (round.promised) {
    return;
  } else if (round.refusal) {
    round.verdict = {round.refusal, nullptr};
  } else if (const std::optional<int> gone = gone_before_it_came(turn)) {
    refuse(turn, comm::is_gone(turn.call, *gone));
  } else if (round.here) {
    round.promised = true;
    tell(turn, Word::kJoin, {std::move(turn.bytes)});
  }
}

/// (4) and (5): a member's deadline has passed.
void Star::give_up(Turn& turn) {
  Round& round = turn.round;
  if (!round.promised) {
    refuse(turn, comm::did_not_come(turn.call, {turn.keeper()}));
  } else if (!round.hurried) {
    round.hurried = true;
    tell(turn, Word::kHurry, {});
  } else if (passed(beyond(turn.deadline))) {
    constexpr const char* kSilent =
        "{}: rank {} came, but gave no verdict by the deadline and {} later: it died, or stands still";
    round.verdict = {Failure{Code::kPeerFailed, fmt::format(kSilent, turn.call, turn.keeper(), grace_)}, nullptr};
  }
}

void Star::decide(Turn& turn, std::optional<Failure> failure) {
  auto bytes = std::make_shared<Bytes>();
  if (!failure) {
    for (auto& offer : turn.round.offers) bytes->push_back(std::move(*offer));
  }
  tell_others(turn, Word::kVerdict, failure, *bytes);
  turn.round.verdict = {std::move(failure), std::move(bytes)};
}

void Star::refuse(Turn& turn, Failure failure) {
  tell_others(turn, Word::kRefuse, failure, {});
  turn.round.verdict = {std::move(failure), nullptr};
}

/// A member other than this rank that is gone, and did not come before, as far as is known here: the round can't be
/// complete.
std::optional<int> Star::gone_before_it_came(const Turn& turn) const {
  for (size_t i = 0; i < turn.lane.members.size(); ++i) {
    const int member = turn.lane.members[i];
    const bool came = !turn.round.offers.empty() && turn.round.offers[i];
    if (member != rank() && !came && gone_[static_cast<size_t>(member)]) return member;
  }
  return std::nullopt;
}

std::string Star::letter(const Turn& turn, Word word, const std::optional<Failure>& failure, const Bytes& texts) {
  comm::Sender out;
  out.number(static_cast<int64_t>(word));
  out.number(turn.lane.kind == Lane::Kind::kAll ? kEverybody : turn.lane.members[0]);
  out.number(static_cast<int64_t>(turn.number));
  out.number(failure ? static_cast<int64_t>(failure->code) : kComplete);
  out.text(failure ? failure->message : "");
  out.number(static_cast<int64_t>(texts.size()));
  for (const std::string& text : texts) out.text(text);
  return out.bytes();
}

void Star::tell(const Turn& turn, Word word, const Bytes& texts) {
  mail_->send(turn.keeper(), std::make_shared<const std::string>(letter(turn, word, std::nullopt, texts)));
}

void Star::tell_others(const Turn& turn, Word word, const std::optional<Failure>& failure, const Bytes& texts) {
  const auto bytes = std::make_shared<const std::string>(letter(turn, word, failure, texts));
  for (const int member : turn.lane.members) {
    if (member != rank() && !gone_[static_cast<size_t>(member)]) mail_->send(member, bytes);
  }
}

/// All that have come. Returns whether there were any.
bool Star::read_letters() {
  bool any = false;
  while (const std::optional<Letter> one = mail_->receive()) {
    any = true;
    if (one->bytes.empty()) {
      gone_[static_cast<size_t>(one->from)] = true;
    } else {
      read(*one);
    }
  }
  return any;
}

void Star::read(const Letter& letter) {
  comm::Receiver in(letter.bytes);
  const auto word = static_cast<Word>(in.number());
  const auto sender = static_cast<int>(in.number());
  const auto number = static_cast<uint64_t>(in.number());
  const int64_t code = in.number();
  std::optional<Failure> failure;
  if (std::string message = in.text(); code != kComplete)
    failure = Failure{static_cast<Code>(code), std::move(message)};
  auto texts = std::make_shared<Bytes>(static_cast<size_t>(in.number()));
  for (std::string& text : *texts) text = in.text();

  Lane lane{Lane::Kind::kAll, everybody_};
  if (sender != kEverybody) lane = {Lane::Kind::kPair, {sender, sender == rank() ? letter.from : rank()}};
  Rounds& rounds = rounds_[lane];
  if (number < rounds.ended) return;
  Round& round = rounds.open[number];
  switch (word) {
    case Word::kHere: round.here = true; break;
    case Word::kJoin: round.offers.at(position(lane, letter.from)) = std::move(texts->at(0)); break;
    case Word::kHurry: round.hurried = true; break;
    case Word::kRefuse: round.refusal = std::move(failure); break;
    case Word::kVerdict: round.verdict = {std::move(failure), std::move(texts)}; break;
  }
}

/// Until what was sent gets there by itself.
void Star::see_off(Deadline until) {
  Pause pause;
  while (!mail_->all_sent()) {
    if (passed(until)) return mail_->leave_unsent();
    pause(until);
  }
}

}  // namespace shardow::over_mpi
