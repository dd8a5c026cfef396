// Rounds over a store: each rank brings its words, all learn one verdict. What a round costs does not grow with the
// number of ranks, but for one of them where there are words.
//
// Numbered, as the code is, for round r:
//
//   1. a rank puts its call and its words behind the verdict of round r - 1 (compare_set), which all ranks have read.
//      The first rank's stay: a rank with the same need do no more. A rank whose words differ, or are long, appends its
//      own to r/words
//   2. it counts itself: a bit in r/lane/<n>, which 31 ranks share; the last rank of a lane counts that in r/lanes. The
//      answers say whether this rank is the last of all, and whether any rank has words
//   3. the last rank gives the verdict. Where there are words it reads them, once, and asks the call what they come to
//   4. the other ranks wait for the one key r/verdict, at most until their deadline; the first rank of each lane looks
//      now and then whether a missing rank has left, or the rank that had to give the verdict is gone. A rank that
//      waited in vain looks up the bits: either ranks are missing, and the verdict says which, or it gives the verdict
//      in place of the rank that had to. compare_set keeps the first
//   5. a good verdict means that all ranks have come, so what lies behind the round is erased, by the first ranks that
//      came to it. Of a round that was not good, or that a rank has left, no rank knows what was written: each of its
//      keys has a rank that erases it once a later round is good. A rank that comes late reads the verdict
//
// Where no rank has words that is at most four operations for each rank: compare_set, add, get or its part of the last
// rank's, erase.
//
// A rank that is interrupted proposes that as the verdict. Where the others had all they need by then it goes on, if
// what interrupted it can be put off, and ends the next round too where not, for those who would wait for it there. In
// both cases it is in step then.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "group/ranks.h"
#include "shardow/store.h"

namespace shardow::group {

/// Ranks that meet, and where; `index` is this rank's among them.
struct Meeting {
  Store& store;
  std::string keys, gone;  ///< what keys begin with, and the key of ranks that have left; empty: none says so
  std::vector<int> ranks;  ///< by whose order words are; for messages
  size_t index;
  bool names_call = true;  ///< in messages on who did not come to a later step: else the caller names it
};

/// Thrown by a Store in place of an answer: its caller was interrupted.
class Interruption {
 public:
  virtual ~Interruption() = default;
  virtual bool put_off() = 0;  ///< whether the caller may go on: what interrupted it comes again later
  virtual std::exception_ptr exception(const std::string& waited) = 0;  ///< for the caller; `waited`: in what
};

/// The call that a rank comes for: all must have the same name.
struct Call {
  std::string name;
  double timeout = 0;     ///< seconds, as messages say it; 0: they do not
  bool is_first = false;  ///< of the rounds of a call
  /// What ended this rank's work, for those who come too late or whom it does not wait for; empty: nothing.
  std::string did = {};
};

/// One rank's end of the rounds of a meeting.
class Rounds {
 public:
  explicit Rounds(Meeting meeting) : meeting_(std::move(meeting)) {}

  using Met = Ranks::Met;

  /// The next round. `decide`, on one rank, of the words of all, unless they are empty. Throws on all ranks what it
  /// throws, kInvalidArgument where calls differ, kTimeout and kPeerFailed naming who did not come.
  Met meet(const Call& call, std::string_view own, const Ranks::Decide* decide, Deadline deadline);

  /// Ends the next round, since this rank was interrupted in `call`: those who wait there learn of it.
  void refuse(const Call& call);

  int64_t count() const noexcept { return next_; }  ///< rounds to which this rank has come

 private:
  const Meeting meeting_;
  int64_t next_ = 0;
  std::optional<std::string> before_ = "";  // the last round's verdict; nothing: it was left
  std::vector<std::string> old_;            // keys to erase once a round was good
};

}  // namespace shardow::group
