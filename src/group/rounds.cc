#include "group/rounds.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <exception>
#include <map>
#include <new>
#include <utility>

#include "base/turns.h"
#include "group/wire.h"
#include "shardow/error.h"

namespace shardow {

void Store::append(const std::string& key, const std::string& value) {
  for (std::string last, next; (next = compare_set(key, last, last + value)) != last + value;) last = next;
}

namespace group {
namespace {

using std::chrono::milliseconds;

constexpr size_t kShort = 512;                  // bytes of words that all ranks may have in common
constexpr size_t kLong = size_t{16} << 10;      // of words and answers: from here on under a key of their own
constexpr size_t kMostBytes = size_t{4} << 20;  // of a value; c10d's TCPStore drops who sends 8 MiB
constexpr int kLane = 31;                       // ranks, with two bits each
constexpr milliseconds kFirstLook{50}, kLook{1000},
    kLookEach{1};  // kLookEach: more for each rank. The first look is for ranks that say that they leave
constexpr milliseconds kGrace{400};      // the first rank that waited in vain has them to name the missing ranks
constexpr milliseconds kBeyond{800};     // and a twentieth: after the deadline, to learn who was missing
constexpr milliseconds kLastWords{500};  // of a rank that was interrupted

/// A verdict in the store: its length, what it is, more, and whatever the next round put behind it. Nothing: it was
/// good, and no rank had words.
enum Kind : int64_t {
  kFailed,   // code, errno, message
  kWords,    // what the first rank put behind the last verdict: each rank reads all words
  kDecided,  // by whom, whether there is an answer for each rank, whether the common one is apart; the common one
};

std::string failure(Code code, const std::string& message, int error = 0) {
  return numbers_and_text({kFailed, static_cast<int64_t>(code), error}, message);
}

std::string framed(const std::string& body) {
  return numbers_and_text({}, body);
}

std::string body_of(const std::string& verdict) {
  return Receiver(verdict).text();
}

bool is_good(const std::string& body) {
  return body.empty() || Receiver(body).number() != kFailed;
}

std::string named(const std::vector<int>& ranks) {
  constexpr size_t kMost = 32;
  const std::vector<int> some(ranks.begin(), ranks.begin() + static_cast<int64_t>(std::min(ranks.size(), kMost)));
  const std::string more = ranks.size() > kMost ? fmt::format(" and {} more", ranks.size() - kMost) : "";
  return fmt::format("rank(s) [{}]{}", fmt::join(some, ", "), more);
}

Deadline beyond(Deadline deadline) {
  const auto more = std::max(deadline - base::now(), {}) / 20 + kBeyond;
  return deadline < Deadline::max() - more ? deadline + more : Deadline::max();
}

[[noreturn]] void throw_failure(const std::string& verdict) {
  Receiver in(verdict);
  in.number();
  const auto code = static_cast<Code>(in.number());
  const auto error = static_cast<int>(in.number());
  throw Error(code, in.text(), error);
}

/// A rank's way through a round, as far as it has come.
class Round {
 public:
  Round(const Meeting& meeting, int64_t number, const Call& call, std::string_view own)
      : at_(meeting),
        store_(meeting.store),
        number_(number),
        call_(call),
        own_(own),
        size_(static_cast<int>(meeting.ranks.size())),
        lanes_((size_ + kLane - 1) / kLane),
        lane_(static_cast<int>(meeting.index) % lanes_),
        members_(size_ / lanes_ + (lane_ < size_ % lanes_ ? 1 : 0)) {}

  /// (1) to (4): the verdict. `before`: the verdict of the last round, as the store has it; nothing where this rank has
  /// left that.
  std::string come(std::optional<std::string> before, const Ranks::Decide* decide, Deadline deadline) {
    if (!before) {
      const std::string has_left = failure(
          Code::kTimeout, fmt::format("rank {} has left: the ranks' store did not answer it", at_.ranks[at_.index]));
      before = framed(body_of(propose(number_ - 1, has_left)));
      // Decides for the others: this rank goes on from its beginning, and they do not.
      if (is_good(body_of(*before))) return body_of(propose(number_, has_left));
    }
    before_ = *before;
    bool any_words = false;
    std::string verdict;
    if (!count(tell(), &any_words)) {
      verdict = wait(deadline);
      if (verdict.empty()) verdict = who_is_missing();
      any_words = verdict.empty() && store_.check(key("words"));
    }
    return body_of(verdict.empty() ? propose(number_, summed_up(any_words, decide)) : verdict);
  }

  /// (4), (5): what a good verdict gives this rank. `old`: keys that are of no use any more.
  Rounds::Met end(const std::string& verdict, const std::vector<std::string>& old) {
    Rounds::Met met;
    Receiver in(verdict);
    const int64_t kind = in.done() ? kDecided : in.number();
    if (kind == kWords) {
      common_ = in.text();
      if (words_.empty()) read_words(true);
      met.words = std::move(words_);
    } else {
      met.words.assign(at_.ranks.size(), own_);
    }
    if (kind == kDecided && !in.done()) {
      const auto by = in.number();
      const bool has_each = in.number() != 0, is_apart = in.number() != 0;
      if (has_each) met.own = get(key("by/{}/for/{}", by, at_.index));
      met.common = is_apart ? get(key("by/{}", by)) : in.text();
    }
    for (const std::string& erased : old) store_.erase(erased);
    if (place_ == 1) store_.erase(key("lane/{}", lane_));
    // The last verdict stays: a slow rank may not have read yet what the first one put behind it (1).
    if (lane_ == 0 && place_ == std::min(2, members_) && number_ > 0) store_.erase(key_of(number_ - 2, "verdict"));
    if (lane_ == 0 && place_ == 3 && lanes_ > 1) store_.erase(key("lanes"));
    return met;
  }

  /// Tells the others, where the store answers at once. Returns what a verdict gives this rank that was good all the
  /// same.
  std::optional<Rounds::Met> interrupted(const std::vector<std::string>& old) {
    waited_ = fmt::format("{}: the ranks' store does not answer", call_.name);
    try {
      const std::string verdict = refuse();
      std::optional<Rounds::Met> met;
      if (is_good(verdict)) met = end(verdict, old);
      std::vector<int> others = met ? std::vector<int>() : missing();
      std::erase(others, at_.ranks[at_.index]);
      waited_ = others.empty() ? call_.name : fmt::format("{}: waited for {}", call_.name, named(others));
      verdict_ = framed(verdict);
      return met;
    } catch (const Error&) {  // it did not, or another signal came
    } catch (const Interruption&) {
    }
    return std::nullopt;
  }

  /// Proposes that this rank was interrupted. Returns the verdict.
  std::string refuse() {
    store_.answer_by(base::after(kLastWords), std::chrono::duration<double>(kLastWords).count());
    const std::string what = fmt::format("rank {} was interrupted in {}", at_.ranks[at_.index], call_.name);
    return body_of(propose(number_, failure(Code::kPeerFailed, what)));
  }

  const std::string& waited() const { return waited_; }                   ///< where it was interrupted: in what
  const std::optional<std::string>& verdict() const { return verdict_; }  ///< and what it met, as the store has it

  /// Keys of this round that others may still read.
  std::vector<std::string> written() { return std::move(written_); }

  /// (5): what this rank is to erase, by and by, of a round that was not good for it.
  std::vector<std::string> left() const {
    std::vector<std::string> keys = written_;
    keys.push_back(key("{}/words", at_.index));
    if (static_cast<int>(at_.index) < lanes_) keys.push_back(key("lane/{}", at_.index));
    if (at_.index > 0) return keys;
    for (const char* what : {"words", "lanes", "asked"}) keys.push_back(key_of(number_, what));
    keys.push_back(key_of(number_ - 2, "verdict"));
    return keys;
  }

 private:
  /// (1): whether this rank's words go beside what all have.
  bool tell() {
    text_ = numbers_and_text({}, call_.name) + own_;
    if (text_.size() <= kShort) {
      common_ = store_.compare_set(key_of(number_ - 1, "verdict"), before_, before_ + text_).substr(before_.size());
      if (*common_ == text_) return false;
    }
    const bool apart = text_.size() > kLong;
    if (apart) put(key("{}/words", at_.index), text_);
    store_.append(key("words"), numbers_and_text({static_cast<int64_t>(at_.index)}, apart ? "" : text_));
    return true;
  }

  /// (2): whether this rank is the last of all.
  bool count(bool has_words, bool* any_words) {
    constexpr int64_t kOne = 1;
    const int bit = static_cast<int>(at_.index) / lanes_;
    const int64_t bits = store_.add(key("lane/{}", lane_), (kOne + (has_words ? kOne << kLane : 0)) << bit);
    place_ = std::popcount(static_cast<uint64_t>(bits) & ((uint64_t{1} << kLane) - 1));
    if (place_ < members_) return false;
    *any_words = bits >> kLane > 0;
    if (lanes_ == 1) return true;
    const int64_t lanes = store_.add(key("lanes"), kOne + (*any_words ? kOne << 32 : 0));
    *any_words = lanes >> 32 > 0;
    return (lanes & ((kOne << 32) - 1)) == lanes_;
  }

  /// (4): empty where the verdict does not come.
  std::string wait(Deadline deadline) {
    if (place_ > 1) return store_.get(key("verdict"), deadline).value_or("");
    for (milliseconds look = at_.gone.empty() ? kLook : kFirstLook;;
         look = std::min(2 * look, kLook + size_ * kLookEach)) {
      const auto until = std::min(deadline, base::after(look));
      if (auto verdict = store_.get(key("verdict"), until)) return *verdict;
      if (until == deadline) return "";
      const std::vector<int> absent = missing();
      if (absent.empty()) return store_.get(key("verdict"), std::min(deadline, base::after(kGrace))).value_or("");
      if (const std::string gone = gone_of(absent); !gone.empty()) return propose(number_, gone);
    }
  }

  /// (4), in vain: a verdict on missing ranks; empty where none is missing.
  std::string who_is_missing() {
    if (store_.add(key("asked"), 1) == 1) {
      written_.push_back(key("asked"));
    } else if (auto verdict = store_.get(key("verdict"), base::after(kGrace))) {
      return *verdict;
    }
    const std::vector<int> absent = missing();
    if (absent.empty()) return "";
    if (const std::string gone = gone_of(absent); !gone.empty()) return propose(number_, gone);
    const std::string when = call_.timeout > 0 ? fmt::format("within {:g} s", call_.timeout) : "before the deadline";
    const std::string late = fmt::format("{} did not take part {}", named(absent), when);
    if (!call_.did.empty())
      return propose(number_, failure(Code::kPeerFailed, fmt::format("rank {} {}", at_.ranks[at_.index], call_.did)));
    const std::string message =
        call_.is_first ? fmt::format(
                             "{} is collective, every rank must call it: {}. Call it on all ranks (not under "
                             "`if rank == 0`), or look for the rank that died",
                             call_.name, late)
                       : fmt::format("{}{}. Look for the rank that died or stands still", prefix(), late);
    return propose(number_, failure(Code::kTimeout, message));
  }

  /// By their names; of a round that has no verdict.
  std::vector<int> missing() {
    std::vector<int64_t> bits(static_cast<size_t>(lanes_));
    for (size_t lane = 0; lane < bits.size(); ++lane) bits[lane] = store_.add(key("lane/{}", lane), 0);
    std::vector<int> ranks;
    for (int i = 0; i < size_; ++i) {
      if ((bits[static_cast<size_t>(i % lanes_)] >> (i / lanes_) & 1) == 0)
        ranks.push_back(at_.ranks[static_cast<size_t>(i)]);
    }
    return ranks;
  }

  /// A verdict on a missing rank that has left; empty where none has.
  std::string gone_of(const std::vector<int>& missing) {
    const std::string ranks = !at_.gone.empty() && store_.check(at_.gone) ? value_of(at_.gone) : "";
    for (Receiver in(ranks); !in.done();) {
      const auto rank = static_cast<int>(in.number());
      if (std::find(missing.begin(), missing.end(), rank) != missing.end())
        return failure(Code::kPeerFailed, fmt::format("{}rank {} is gone", prefix(), rank));
    }
    return "";
  }

  /// (3)
  std::string summed_up(bool any_words, const Ranks::Decide* decide) {
    if (!any_words && (decide == nullptr || own_.empty())) return "";
    read_words(any_words);
    written_.push_back(key("words"));
    for (size_t i = 1; i < calls_.size(); ++i) {
      if (calls_[i] == calls_[0]) continue;
      return failure(Code::kInvalidArgument,
                     fmt::format("rank {} calls {} where rank {} calls {}; every rank must make the same collective "
                                 "calls in the same order",
                                 at_.ranks[i], calls_[i], at_.ranks[0], calls_[0]));
    }
    if (decide == nullptr) return numbers_and_text({kWords}, common_.value_or(""));
    const bool all_empty = std::all_of(words_.begin(), words_.end(), [](const auto& words) { return words.empty(); });
    return all_empty ? "" : decided(*decide);
  }

  /// Writes what does not fit into a verdict before it, under keys that no other rank writes.
  std::string decided(const Ranks::Decide& decide) {
    Ranks::Decision made;
    try {
      made = decide(words_);
    } catch (const Error& error) {
      return failure(error.code(), error.what(), error.os_errno());
    } catch (const std::bad_alloc&) {
      return failure(Code::kOutOfMemory, fmt::format("rank {} has no memory left", at_.ranks[at_.index]));
    } catch (const std::exception& error) {
      return failure(Code::kPeerFailed, fmt::format("rank {}: {}", at_.ranks[at_.index], error.what()));
    }
    const bool is_apart = made.common.size() > kLong, has_each = !made.each.empty();
    if (is_apart) put(key("by/{}", at_.index), made.common);
    for (size_t i = 0; i < made.each.size(); ++i) put(key("by/{}/for/{}", at_.index, i), made.each[i]);
    return numbers_and_text({kDecided, static_cast<int64_t>(at_.index), has_each, is_apart},
                            is_apart ? "" : made.common);
  }

  void read_words(bool any_words) {
    std::map<int64_t, std::string> texts;
    const std::string listed = any_words ? value_of(key("words")) : "";
    for (Receiver in(listed); !in.done();) {
      const int64_t index = in.number();
      texts[index] = in.text();
      if (index == static_cast<int64_t>(at_.index)) texts[index] = text_;
      if (texts[index].empty()) texts[index] = get(key("{}/words", index));
    }
    if (texts.size() < at_.ranks.size() && !common_)
      common_ = value_of(key_of(number_ - 1, "verdict")).substr(before_.size());
    calls_.clear();
    words_.clear();
    for (int64_t i = 0; i < size_; ++i) {
      const auto entry = texts.find(i);
      const std::string& text = entry != texts.end() ? entry->second : *common_;
      calls_.push_back(Receiver(text).text());
      words_.push_back(text.substr(sizeof(int64_t) + calls_.back().size()));
    }
  }

  std::string prefix() const { return at_.names_call ? call_.name + ": " : ""; }

  /// `body`, or the verdict that was verdict before.
  std::string propose(int64_t number, const std::string& body) {
    return store_.compare_set(key_of(number, "verdict"), "", framed(body));
  }

  /// Long values take several keys. The first one, which others wait for, is written last and begins with the length of
  /// it all.
  void put(const std::string& key, std::string_view value) {
    written_.push_back(key);
    for (size_t at = kMostBytes; at < value.size(); at += kMostBytes) {
      written_.push_back(fmt::format("{}/{}", key, at));
      store_.set(written_.back(), std::string(value.substr(at, kMostBytes)));
    }
    Sender length;
    length.number(static_cast<int64_t>(value.size()));
    store_.set(key, length.bytes() + std::string(value.substr(0, kMostBytes)));
  }

  std::string get(const std::string& key) {
    std::string value = value_of(key);
    const auto length = static_cast<size_t>(Receiver(value).number());
    value.erase(0, sizeof(int64_t));
    for (size_t at = kMostBytes; at < length; at += kMostBytes) value += value_of(fmt::format("{}/{}", key, at));
    return value;
  }

  std::string value_of(const std::string& key) { return store_.get(key, Deadline::max()).value(); }

  std::string key_of(int64_t number, std::string_view what) const {
    return fmt::format("{}{}/{}", at_.keys, number, what);
  }
  template <typename... Args>
  std::string key(fmt::format_string<Args...> what, Args&&... args) const {
    return key_of(number_, fmt::format(what, std::forward<Args>(args)...));
  }

  const Meeting& at_;
  Store& store_;
  const int64_t number_;
  const Call call_;
  const std::string own_;
  const int size_, lanes_, lane_, members_;  // members_: of this rank's lane
  std::string before_, text_;                // text_: of call and words
  std::optional<std::string> common_;        // what the first one put behind the last verdict
  std::vector<std::string> calls_, words_, written_;
  std::string waited_;
  std::optional<std::string> verdict_;
  int place_ = 0;  // among those of its lane, from 1 on; 0: it has not come
};

}  // namespace

Rounds::Met Rounds::meet(const Call& call, std::string_view own, const Ranks::Decide* decide, Deadline deadline) {
  if (meeting_.ranks.size() == 1) {
    ++next_;
    Ranks::Decision made;
    if (decide != nullptr && !own.empty()) made = (*decide)({std::string(own)});
    return {std::move(made.common), made.each.empty() ? std::string() : std::move(made.each[0]), {std::string(own)}};
  }
  Round round(meeting_, next_++, call, own);
  const std::vector<std::string> old = std::exchange(old_, {});
  const auto leave = [&](std::optional<std::string> verdict) {
    before_ = std::move(verdict);
    old_ = round.left();
    old_.insert(old_.end(), old.begin(), old.end());
  };
  std::string verdict;
  try {
    meeting_.store.answer_by(beyond(deadline), call.timeout);
    verdict = round.come(std::exchange(before_, std::nullopt), decide, deadline);
    if (is_good(verdict)) {
      Met met = round.end(verdict, old);
      before_ = framed(verdict);
      old_ = round.written();
      return met;
    }
  } catch (Interruption& interruption) {
    std::optional<Met> met = round.interrupted(old);
    const bool goes_on = met && interruption.put_off();
    leave(round.verdict());
    if (goes_on) return std::move(*met);
    if (met) refuse(call);
    std::rethrow_exception(interruption.exception(round.waited()));
  } catch (const Error& error) {
    leave(std::nullopt);
    throw Error(error.code(), fmt::format("{}: {}", call.name, error.what()), error.os_errno());
  } catch (...) {
    leave(std::nullopt);
    throw;
  }
  leave(framed(verdict));
  throw_failure(verdict);
}

void Rounds::refuse(const Call& call) {
  Round round(meeting_, next_++, call, "");
  before_ = std::nullopt;
  for (std::string& key : round.left()) old_.push_back(std::move(key));
  try {
    round.refuse();
  } catch (const Error&) {  // the store has no answer: who waits there waits until the deadline
  } catch (const Interruption&) {
  }
}

}  // namespace group
}  // namespace shardow
