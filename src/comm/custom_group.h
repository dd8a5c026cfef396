// Meeting: the one call that a Group is made of.
#pragma once

#include <compare>
#include <memory>
#include <string>
#include <vector>

#include "shardow/detail/store.h"
#include "shardow/group.h"

namespace shardow {

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

}  // namespace shardow
