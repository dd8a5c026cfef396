// Rounds over a store: each rank brings its words, all learn one verdict. What a round costs does not grow with the
// number of ranks, but for one of them where there are words.
//
// Numbered, as the code is, for round r:
//
//   1. a rank puts its call and its words behind the verdict of round r - 1 (compare_set), which all have read. The
//      first one's stay: who has the same has told all. Only who differs, or has much to say, appends its own to
//      r/words
//   2. it counts itself: a bit in r/lane/<n>, which 31 ranks share; the last of a lane counts that in r/lanes. The
//      answers tell who was last of all, and whether anybody has words
//   3. the last of all gives the verdict. Where there are words it reads them, once, and asks the call what they come
//   to
//   4. all others wait for the one key r/verdict, at most until their deadline; the first of each lane looks now and
//      then whether somebody who is missing has left, or whoever had to give the verdict has. Who waited in vain looks
//      up the bits: either ranks are missing, and the verdict says which, or it gives the verdict in another's place.
//      compare_set keeps the first
//   5. a good verdict means that all have come, so what lies behind the round is erased, by the first ranks that came
//      to it. Of a round that was not good, or that a rank has left, nobody knows who wrote what: each of its keys has
//      a rank that erases it once a later one is good. A rank that comes to a round that is over reads its verdict
//
// Where all is well and nobody has words that is at most four operations for each rank: compare_set, add, get or its
// part of the last one's, erase. shardow/ranks/rounds.py is the same for Python.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/detail/store.h"
#include "shardow/group.h"

namespace shardow::comm {

/// Who meets, and where; `index` is this rank's among them.
struct Meeting {
  Store& store;
  std::string keys, gone;  ///< what keys begin with, and the key of ranks that have left
  std::vector<int> ranks;  ///< by whose order words are; for messages
  size_t index;
};

/// One rank's end of the rounds of a meeting.
class Rounds {
 public:
  explicit Rounds(Meeting meeting) : meeting_(std::move(meeting)) {}

  struct Met {
    std::string common, own;             ///< of what was decided
    std::vector<std::string> everybody;  ///< without `decide`: every rank's words
  };

  /// The next round. `decide`, on one rank, of everybody's words, unless all are empty. Throws on all ranks what it
  /// throws, kInvalidArgument where calls differ, kTimeout and kPeerFailed naming who did not come.
  Met meet(const std::string& call, std::string_view mine, const Group::Decide* decide, Deadline deadline);

 private:
  const Meeting meeting_;
  int64_t next_ = 0;
  std::optional<std::string> before_ = "";  // the last round's verdict; nothing: it was left
  std::vector<std::string> old_;            // keys to erase once a round was good
};

}  // namespace shardow::comm
