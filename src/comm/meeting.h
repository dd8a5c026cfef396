// Meeting: where ranks bring bytes and take everybody's away. What a Group is made of, wherever its ranks are.
#pragma once

#include <compare>
#include <memory>
#include <string>
#include <vector>

#include "shardow/group.h"

namespace shardow::comm {

/// A sequence of rounds between the same members, each of which comes to them in the same order.
struct Lane {
  enum class Kind { kAll, kPair } kind;  ///< collectives of all ranks, or blocks from members[0] to members[1]
  std::vector<int> members;
  auto operator<=>(const Lane&) const = default;
};

/// What one rank brings: its call, as it stands in messages, must be equal for all members.
struct Offer {
  std::string call, bytes;
};

/// One rank's. The rank leaves when it is destroyed.
class Meeting {
 public:
  /// What the members brought, in the members' order. Never changes once the verdict is given.
  using Bytes = std::vector<std::string>;

  virtual ~Meeting() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// The next round of the lane, of which this rank is a member. Throws the round's verdict, unless all members came, and made the same
  /// call.
  virtual std::shared_ptr<const Bytes> meet(const Lane& lane, Offer offer, Deadline deadline) = 0;
};

}  // namespace shardow::comm
