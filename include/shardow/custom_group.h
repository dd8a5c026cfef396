// A Group of your own, for ranks that talk through something else than threads, MPI or torch. Write the smallest of these that fits:
//
//   class Store    seven calls over keys and values that all ranks reach: etcd, Redis, files. store_group() makes the Group
//   class Meeting  one call that brings ranks together. meeting_group() makes the Group
//   class Group    rank, size and five calls (group.h), where your network has such calls already
//
// group_checks() is the judge. All ranks run all checks at once and in this order, each with its own Group: threads, or processes under a
// launcher.
//
//   for (const GroupCheck& check : group_checks()) {
//     for (const std::string& wrong : check.run(group)) std::cerr << check.name << ": " << wrong << '\n';
//   }
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Keys and values that all ranks reach, as those of torch's c10d::Store. Every call throws kPeerFailed where the store is gone.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;  ///< any bytes, 4 MiB at most

  /// Sets `value` where the key has none yet, and returns what it has then; one step for all ranks.
  virtual std::string set_first(const std::string& key, const std::string& value) = 0;

  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;  ///< of keys that are there
  virtual bool has(const std::string& key) = 0;
  virtual bool wait(const std::vector<std::string>& keys, Deadline deadline) = 0;  ///< until all are there; false: not by then
  virtual int64_t add(const std::string& key) = 0;                                 ///< one more; how many there are then
  virtual void erase(const std::string& key) = 0;                                  ///< that is there
};

/// This rank's Group of those that share a store, which starts empty: give each run a place, or a prefix, of its own. The Group alone uses
/// `store`, since a wait holds it. The n-th Group that a rank makes acts with the n-th of the others. All bytes go through the store: fast
/// enough for saves and loads, too slow for swaps with AverageOptions::replicas, which send whole averages.
std::unique_ptr<Group> store_group(std::unique_ptr<Store> store, int rank, int size);

/// Where ranks bring bytes and take everybody's away; one object on each rank. Its destructor tells the others that the rank is gone.
class Meeting {
 public:
  /// A sequence of rounds between the same members, who come to them in the same order. Lanes don't wait for one another.
  struct Lane {
    enum class Kind { kAll, kPair } kind;  ///< all ranks; or members[0] has a block for members[1]
    std::vector<int> members;              ///< ranks
    auto operator<=>(const Lane&) const = default;
  };

  /// What one rank brings: up to 32 MiB, and the name of its call, for messages.
  struct Offer {
    std::string call, bytes;
  };
  using Bytes = std::vector<std::string>;  ///< by member

  virtual ~Meeting() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// This rank's next round of the lane, of which it is a member. A round ends alike for all its members, whenever they come:
  ///
  ///   all came                             what they brought is returned, and does not change any more
  ///   some did not, and a deadline passed  kTimeout, with the numbers of the ranks that are missing
  ///   one that did not come is gone        kPeerFailed, with its number
  ///
  /// So a member that comes late, when the others have given up, gets their error, and its next round is their next one.
  virtual std::shared_ptr<const Bytes> meet(const Lane& lane, Offer offer, Deadline deadline) = 0;
};

std::unique_ptr<Group> meeting_group(std::unique_ptr<Meeting> meeting);

struct GroupCheck {
  std::string name;  ///< what is checked, as one word: "all_gather_is_indexed_by_rank"

  /// What is wrong on this rank, in sentences; none: nothing. It catches what the group throws. Where nothing is wrong the group is in step
  /// for the next check. Some let a deadline of 100 ms pass on purpose; one that hangs ends after two minutes, if the group keeps
  /// deadlines. Checks of blocks find nothing where Group::moves_blocks() is false.
  std::function<std::vector<std::string>(Group& group)> run;
};

/// Of the calls and their deadlines, then of agree() over them; for any number of ranks. Try 1, 2, 3 and 8.
std::vector<GroupCheck> group_checks();

}  // namespace shardow
#pragma GCC visibility pop
