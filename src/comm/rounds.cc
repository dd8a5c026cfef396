#include "comm/rounds.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <exception>
#include <map>
#include <utility>

#include "base/errors.h"
#include "base/turns.h"
#include "comm/verdicts.h"
#include "comm/wire.h"

namespace shardow {

void Store::append(const std::string& key, const std::string& value) {
  for (std::string there = compare_set(key, "", value); there != value;) {
    const std::string longer = there + value, now = compare_set(key, there, longer);
    if (now == longer) return;
    there = now;
  }
}

namespace comm {
namespace {

using std::chrono::milliseconds;

constexpr size_t kShort = 512;                                     // bytes of words that may be everybody's
constexpr size_t kLong = size_t{16} << 10;                         // from here on words are under a key of their own
constexpr size_t kInline = 1024;                                   // bytes of an answer that is a verdict's part
constexpr size_t kMostBytes = size_t{4} << 20;                     // of a value; c10d's TCPStore drops who sends 8 MiB
constexpr int kLane = 31;                                          // ranks, with two bits each
constexpr milliseconds kFirstLook{50}, kLook{1000}, kLookEach{1};  // kLookEach: more for each rank
constexpr milliseconds kGrace{400};  // the first one that waited in vain has them to say for whom

// A verdict in the store: its length, a blank, "-" and a failure, or one of "+" and the answer, "@" and the rank under
// whose key the answer is, "=" and what the first rank put behind the last verdict, where everybody reads all words;
// "#" and the rank under whose keys each rank's own answer is comes before these. Then whatever the next round put
// behind it.

std::string framed(std::string_view body) {
  return fmt::format("{} {}", body.size(), body);
}

std::string body_of(const std::string& verdict) {
  const size_t blank = verdict.find(' ');
  return verdict.substr(blank + 1, std::stoull(verdict));
}

bool is_good(const std::string& body) {
  return !body.starts_with('-');
}

std::string failure(const Error& error) {
  Sender out;
  out.number(static_cast<int64_t>(error.code()));
  out.number(error.os_errno());
  out.text(error.what());
  return "-" + out.bytes();
}

std::string failure(const Failure& failed) {
  return failure(Error(failed.code, failed.message));
}

[[noreturn]] void throw_failure(std::string_view body) {
  Receiver in(body.substr(1));
  const auto code = static_cast<Code>(in.number());
  const auto error = static_cast<int>(in.number());
  throw Error(code, in.text(), error);
}

/// The number that the text begins with, which goes, with the character behind it.
int64_t take_number(std::string_view& text) {
  const size_t end = text.find_first_of(" \n");
  const int64_t number = std::stoll(std::string(text.substr(0, end)));
  text.remove_prefix(std::min(text.size(), end + 1));
  return number;
}

struct Words {
  std::string call, mine;

  static std::string encode(std::string_view call, std::string_view mine) {
    return fmt::format("{} {}{}", call.size(), call, mine);
  }
  static Words decode(std::string_view text) {
    const auto length = static_cast<size_t>(take_number(text));
    return {std::string(text.substr(0, length)), std::string(text.substr(length))};
  }
};

}  // namespace

/// A rank's way through a round, as far as it has come.
struct Rounds::Turn {
  int64_t number;
  std::string call, mine, text;                   // text: of call and mine
  std::optional<std::string> before;              // the verdict of the last round, as the store has it
  std::vector<std::string> old;                   // keys that are of no use once this round was good
  std::vector<std::string> written{};             // keys of this round, which others may still read
  int place = 0;                                  // among those of its lane, from 1 on; 0: it has not come
  std::optional<std::string> common{};            // what the first one put behind the last verdict
  std::vector<std::string> calls{}, everybody{};  // of all ranks
  std::string verdict{};                          // empty: none yet
};

Rounds::Rounds(Store& store, Place place)
    : store_(store),
      place_(std::move(place)),
      size_(static_cast<int>(place_.ranks.size())),
      lanes_((size_ + kLane - 1) / kLane),
      lane_(static_cast<int>(place_.index) % lanes_),
      bit_(static_cast<int>(place_.index) / lanes_) {}

Rounds::Met Rounds::meet(const std::string& call, std::string_view mine, const Group::Decide* decide,
                         Deadline deadline) {
  Turn turn{next_++,
            call,
            std::string(mine),
            Words::encode(call, mine),
            std::exchange(before_, std::nullopt),
            std::exchange(old_, {})};
  try {
    come(turn, decide, deadline);
    const std::string body = body_of(turn.verdict);
    if (!is_good(body)) {
      before_ = framed(body);
      throw_failure(body);
    }
    Met met = end(turn);
    before_ = framed(body);
    old_ = std::move(turn.written);
    return met;
  } catch (...) {
    old_ = left_by(turn);
    throw;
  }
}

/// (1) to (4).
void Rounds::come(Turn& turn, const Group::Decide* decide, Deadline deadline) {
  const Failure has_left{
      Code::kTimeout, fmt::format("rank {} has left: the ranks' store did not answer it", place_.ranks[place_.index])};
  if (!turn.before) {
    const std::string last = body_of(propose(turn.number - 1, failure(has_left)));
    turn.before = framed(last);
    // Decides for the others: this rank goes on from its beginning, and they do not.
    if (is_good(last)) {
      turn.verdict = propose(turn.number, failure(has_left));
      return;
    }
  }
  bool any_words = false;
  const bool has_words = tell(turn);
  if (!count(turn, has_words, &any_words)) {
    turn.verdict = wait(turn, deadline);
    if (turn.verdict.empty()) turn.verdict = who_is_missing(turn);
    any_words = turn.verdict.empty() && store_.check(key(turn.number, "words"));
  }
  if (turn.verdict.empty()) sum_up(turn, any_words, decide);
}

/// (1): whether this rank's words go beside what all have.
bool Rounds::tell(Turn& turn) {
  if (turn.text.size() <= kShort) {
    const std::string found =
        store_.compare_set(key(turn.number - 1, "verdict"), *turn.before, *turn.before + turn.text);
    turn.common = found.substr(turn.before->size());
    if (*turn.common == turn.text) return false;
  }
  const bool apart = turn.text.size() > kLong;
  if (apart) put(key(turn.number, fmt::format("{}/words", place_.index)), turn.text, turn.written);
  store_.append(key(turn.number, "words"), fmt::format("{} {} {}", place_.index, apart ? 0 : turn.text.size(),
                                                       apart ? std::string_view() : turn.text));
  return true;
}

/// (2): whether this rank is the last of all.
bool Rounds::count(Turn& turn, bool has_words, bool* any_words) {
  constexpr int64_t kOne = 1;
  const int64_t bits =
      store_.add(key(turn.number, fmt::format("lane/{}", lane_)), (kOne + (has_words ? kOne << kLane : 0)) << bit_);
  turn.place = std::popcount(static_cast<uint64_t>(bits) & ((uint64_t{1} << kLane) - 1));
  if (turn.place < members()) return false;
  *any_words = bits >> kLane > 0;
  if (lanes_ == 1) return true;
  const int64_t lanes = store_.add(key(turn.number, "lanes"), kOne + (*any_words ? kOne << 32 : 0));
  *any_words = lanes >> 32 > 0;
  return (lanes & ((kOne << 32) - 1)) == lanes_;
}

/// (4): empty where the verdict does not come.
std::string Rounds::wait(Turn& turn, Deadline deadline) {
  const std::string verdict = key(turn.number, "verdict");
  if (turn.place > 1) return store_.get(verdict, deadline).value_or("");
  for (milliseconds look = kFirstLook;; look = std::min(2 * look, kLook + size_ * kLookEach)) {
    const auto until = std::min(deadline, base::now() + look);
    if (auto given = store_.get(verdict, until)) return *given;
    if (until == deadline) return "";
    const std::vector<int> absent = missing(turn.number);
    if (absent.empty()) return store_.get(verdict, std::min(deadline, base::now() + kGrace)).value_or("");
    if (const std::string gone = failure_for(turn.call, absent); !gone.empty()) return propose(turn.number, gone);
  }
}

/// (4), in vain: a verdict on those who are missing; empty where nobody is.
std::string Rounds::who_is_missing(Turn& turn) {
  const std::string asked = key(turn.number, "asked");
  if (store_.add(asked, 1) == 1) {
    turn.written.push_back(asked);
  } else if (auto given = store_.get(key(turn.number, "verdict"), base::now() + kGrace)) {
    return *given;
  }
  const std::vector<int> absent = missing(turn.number);
  if (absent.empty()) return "";
  const std::string gone = failure_for(turn.call, absent);
  return propose(turn.number, gone.empty() ? failure(did_not_come(turn.call, absent)) : gone);
}

/// That one of the missing ranks has left; empty where none has.
std::string Rounds::failure_for(const std::string& call, const std::vector<int>& missing) {
  if (!store_.check(place_.gone)) return "";
  const std::string ranks = store_.get(place_.gone, Deadline::max()).value_or("");
  for (std::string_view left = ranks; !left.empty();) {
    const auto rank = static_cast<int>(take_number(left));
    if (std::find(missing.begin(), missing.end(), rank) != missing.end()) return failure(is_gone(call, rank));
  }
  return "";
}

/// (3)
void Rounds::sum_up(Turn& turn, bool any_words, const Group::Decide* decide) {
  std::string body = any_words ? "=" : "+";
  if (any_words || (decide != nullptr && !turn.mine.empty())) {
    read_everybody(turn, any_words);
    turn.written.push_back(key(turn.number, "words"));
    const auto misfit = do_not_fit(turn.calls, place_.ranks);
    const bool all_empty =
        std::all_of(turn.everybody.begin(), turn.everybody.end(), [](const auto& one) { return one.empty(); });
    if (misfit) {
      body = failure(*misfit);
    } else if (decide != nullptr) {
      body = all_empty ? "+" : decided(turn, *decide);
    }
  }
  if (body == "=") body += turn.common.value_or("");
  turn.verdict = propose(turn.number, body);
}

/// What `decide` makes of everybody's words. What does not fit into a verdict is there before it, under keys that no
/// other rank writes.
std::string Rounds::decided(Turn& turn, const Group::Decide& decide) {
  Group::Decision made;
  try {
    made = decide(turn.everybody);
  } catch (const Error& error) {
    return failure(error);
  } catch (const std::exception& error) {
    return failure(Error(Code::kPeerFailed, fmt::format("rank {}: {}", place_.ranks[place_.index], error.what())));
  }
  const auto& [common, each] = made;
  const std::string here = fmt::format("by/{}", place_.index);
  std::string body = "+" + common;
  if (common.size() > kInline) {
    put(key(turn.number, here), common, turn.written);
    body = fmt::format("@{}", place_.index);
  }
  if (std::all_of(each.begin(), each.end(), [](const auto& one) { return one.empty(); })) return body;
  for (size_t i = 0; i < each.size(); ++i)
    put(key(turn.number, fmt::format("{}/for/{}", here, i)), each[i], turn.written);
  return fmt::format("#{} {}", place_.index, body);
}

void Rounds::read_everybody(Turn& turn, bool any_words) {
  std::map<size_t, std::string> texts;
  const std::string words = any_words ? store_.get(key(turn.number, "words"), Deadline::max()).value() : "";
  for (std::string_view left = words; !left.empty();) {
    const auto index = static_cast<size_t>(take_number(left)), length = static_cast<size_t>(take_number(left));
    texts[index] = left.substr(0, length);
    left.remove_prefix(length);
    if (index == place_.index) texts[index] = turn.text;
    if (texts[index].empty()) texts[index] = get(key(turn.number, fmt::format("{}/words", index)));
  }
  if (texts.size() < place_.ranks.size() && !turn.common)
    turn.common = store_.get(key(turn.number - 1, "verdict"), Deadline::max()).value().substr(turn.before->size());
  turn.calls.clear();
  turn.everybody.clear();
  for (size_t i = 0; i < place_.ranks.size(); ++i) {
    const auto found = texts.find(i);
    Words one = Words::decode(found != texts.end() ? found->second : *turn.common);
    turn.calls.push_back(std::move(one.call));
    turn.everybody.push_back(std::move(one.mine));
  }
}

/// (4), (5): what a good verdict gives this rank.
Rounds::Met Rounds::end(Turn& turn) {
  const std::string verdict = body_of(turn.verdict);
  std::string_view body = verdict;
  Met met;
  if (body.starts_with('#')) {
    body.remove_prefix(1);
    met.own = get(key(turn.number, fmt::format("by/{}/for/{}", take_number(body), place_.index)));
  }
  const char kind = body.front();
  body.remove_prefix(1);
  if (kind == '=') {
    turn.common = body;
    if (turn.everybody.empty()) read_everybody(turn, true);
    met.everybody = std::move(turn.everybody);
  } else {
    met.common = kind == '@' ? get(key(turn.number, fmt::format("by/{}", body))) : std::string(body);
    met.everybody.assign(place_.ranks.size(), turn.mine);
  }
  for (const std::string& old : turn.old) store_.erase(old);
  if (turn.place == 1) store_.erase(key(turn.number, fmt::format("lane/{}", lane_)));
  // The last verdict stays: a slow rank may not have read yet what the first one put behind it (1).
  if (lane_ == 0 && turn.place == std::min(2, members()) && turn.number > 0)
    store_.erase(key(turn.number - 2, "verdict"));
  if (lane_ == 0 && turn.place == 3 && lanes_ > 1) store_.erase(key(turn.number, "lanes"));
  return met;
}

/// (5): what this rank is to erase, by and by, of a round that was not good for it, and of those before.
std::vector<std::string> Rounds::left_by(const Turn& turn) const {
  std::vector<std::string> keys = turn.old;
  keys.insert(keys.end(), turn.written.begin(), turn.written.end());
  keys.push_back(key(turn.number, fmt::format("{}/words", place_.index)));
  if (static_cast<int>(place_.index) < lanes_) keys.push_back(key(turn.number, fmt::format("lane/{}", place_.index)));
  if (place_.index == 0) {
    for (const char* what : {"words", "lanes", "asked"}) keys.push_back(key(turn.number, what));
    keys.push_back(key(turn.number - 2, "verdict"));
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

std::string Rounds::key(int64_t number, std::string_view what) const {
  return fmt::format("{}{}/{}", place_.keys, number, what);
}

/// Of a round that has no verdict; by their names.
std::vector<int> Rounds::missing(int64_t number) {
  std::vector<int64_t> bits;
  for (int lane = 0; lane < lanes_; ++lane) bits.push_back(store_.add(key(number, fmt::format("lane/{}", lane)), 0));
  std::vector<int> ranks;
  for (int i = 0; i < size_; ++i) {
    if ((bits[static_cast<size_t>(i % lanes_)] >> (i / lanes_) & 1) == 0)
      ranks.push_back(place_.ranks[static_cast<size_t>(i)]);
  }
  return ranks;
}

/// `body`, or the verdict that was given before.
std::string Rounds::propose(int64_t number, const std::string& body) {
  return store_.compare_set(key(number, "verdict"), "", framed(body));
}

/// Long values take several keys. The first one, which others wait for, is written last and begins with the length of
/// it all. `written` gains the keys beforehand.
void Rounds::put(const std::string& key, std::string_view value, std::vector<std::string>& written) {
  written.push_back(key);
  for (size_t at = kMostBytes; at < value.size(); at += kMostBytes) {
    written.push_back(fmt::format("{}/{}", key, at));
    store_.set(written.back(), std::string(value.substr(at, kMostBytes)));
  }
  store_.set(key, fmt::format("{}\n{}", value.size(), value.substr(0, kMostBytes)));
}

std::string Rounds::get(const std::string& key) {
  const std::string first = store_.get(key, Deadline::max()).value();
  std::string_view left = first;
  const auto length = static_cast<size_t>(take_number(left));
  std::string value(left);
  for (size_t at = kMostBytes; at < length; at += kMostBytes)
    value += store_.get(fmt::format("{}/{}", key, at), Deadline::max()).value();
  return value;
}

/// Of this rank's lane.
int Rounds::members() const {
  return size_ / lanes_ + (lane_ < size_ % lanes_ ? 1 : 0);
}

}  // namespace comm
}  // namespace shardow
