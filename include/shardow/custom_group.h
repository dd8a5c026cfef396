// A Group of your own: write the smallest that fits, a Store, a Meeting or a Group. group_checks() is the judge; all ranks run this at
// once:
//
//   for (const GroupCheck& check : group_checks()) {
//     for (const std::string& wrong : check.run(group)) std::cerr << check.name << ": " << wrong << '\n';
//   }
//
// The rules: docs/cpp.md, "A Group of your own".
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

/// Keys and values that all ranks reach (etcd, Redis, files); throws kPeerFailed where it is gone.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;  ///< any bytes, up to 4 MiB

  /// Sets `value` where the key has none, atomically; returns what it has then.
  virtual std::string set_first(const std::string& key, const std::string& value) = 0;

  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;  ///< of keys that are there
  virtual bool has(const std::string& key) = 0;
  virtual bool wait(const std::vector<std::string>& keys, Deadline deadline) = 0;  ///< until all are there; false: not by then
  virtual int64_t add(const std::string& key) = 0;                                 ///< one more; returns how many
  virtual void erase(const std::string& key) = 0;                                  ///< that is there
};

/// The Group of ranks that share a store, which starts empty and which it alone uses.
std::unique_ptr<Group> store_group(std::unique_ptr<Store> store, int rank, int size);

/// Where ranks exchange bytes. Its end tells the others that this rank is gone.
class Meeting {
 public:
  /// Rounds of the same members, in the same order. Lanes do not wait for one another.
  struct Lane {
    enum class Kind { kAll, kPair } kind;  ///< all ranks, or from members[0] to members[1]
    std::vector<int> members;
    auto operator<=>(const Lane&) const = default;
  };

  struct Offer {
    std::string call, bytes;  ///< for messages; up to 32 MiB
  };
  using Bytes = std::vector<std::string>;  ///< by member

  virtual ~Meeting() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// This rank's next round of the lane. It ends alike for all members, late ones too: with what all brought, or kTimeout or kPeerFailed
  /// with the numbers of those that did not come.
  virtual std::shared_ptr<const Bytes> meet(const Lane& lane, Offer offer, Deadline deadline) = 0;
};

std::unique_ptr<Group> meeting_group(std::unique_ptr<Meeting> meeting);

struct GroupCheck {
  std::string name;                                           ///< "all_gather_is_indexed_by_rank"
  std::function<std::vector<std::string>(Group& group)> run;  ///< what is wrong on this rank; empty: nothing
};

/// Try 1, 2, 3 and 8 ranks.
std::vector<GroupCheck> group_checks();

}  // namespace shardow
#pragma GCC visibility pop
