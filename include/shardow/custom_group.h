// A Group of your own, of a Store, a Meeting or your own calls; group_checks() judges it. The rules: docs/cpp.md, "A
// Group of your own".
#pragma once

#include <compare>

#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Keys and values that all ranks reach; kPeerFailed where it is gone.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;  ///< up to 4 MiB

  /// Atomic: sets it where none is; returns what is there.
  virtual std::string set_first(const std::string& key, const std::string& value) = 0;

  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;  ///< which are there
  virtual bool has(const std::string& key) = 0;
  virtual bool wait(const std::vector<std::string>& keys, Deadline deadline) = 0;  ///< for all; false: not by then
  virtual int64_t add(const std::string& key) = 0;                                 ///< adds 1, returns the sum
  virtual void erase(const std::string& key) = 0;
};

/// The store starts empty, and is for this Group alone.
std::unique_ptr<Group> store_group(std::unique_ptr<Store> store, int rank, int size);

/// Where ranks exchange bytes; its destructor tells the others that this rank is gone.
class Meeting {
 public:
  /// Rounds of the same members. Lanes do not wait for one another.
  struct Lane {
    enum class Kind { kAll, kPair } kind;  ///< kPair: members[0] to members[1]
    std::vector<int> members;
    auto operator<=>(const Lane&) const = default;
  };

  struct Offer {
    std::string call, bytes;  ///< for messages; up to 32 MiB
  };
  using Bytes = std::vector<std::string>;

  virtual ~Meeting() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// The lane's next round; it ends alike for all, late ones too: with what all brought, or kTimeout or kPeerFailed
  /// naming who did not come.
  virtual std::shared_ptr<const Bytes> meet(const Lane& lane, Offer offer, Deadline deadline) = 0;
};

std::unique_ptr<Group> meeting_group(std::unique_ptr<Meeting> meeting);

struct GroupCheck {
  std::string name;
  std::function<std::vector<std::string>(Group& group)> run;  ///< what is wrong; empty: nothing
};

/// All ranks run each at once; try 1, 2, 3 and 8.
std::vector<GroupCheck> group_checks();

}  // namespace shardow
#pragma GCC visibility pop
