// Rounds: what ranks in one process share to act together. Each rank brings bytes to a round and takes everybody's
// away, or the verdict that it failed.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "comm/custom_group.h"
#include "comm/verdicts.h"

namespace shardow::comm {

using Lane = Meeting::Lane;
using Offer = Meeting::Offer;

/// Thread-safe. A round's verdict is given once, by whoever first knows it, and read by all its members:
///
///   complete     the last member has arrived
///   kTimeout     a waiting member's deadline passed
///   kPeerFailed  a member that has not arrived is gone
class Rounds {
 public:
  using Bytes = Meeting::Bytes;

  explicit Rounds(int num_ranks)
      : next_round_(static_cast<size_t>(num_ranks)), gone_(static_cast<size_t>(num_ranks), false) {}

  /// The next round of the lane for `rank`, one of its members. Throws the verdict, unless that is complete.
  std::shared_ptr<const Bytes> meet(int rank, const Lane& lane, Offer offer, Deadline deadline);

  /// The rank will come to no further round.
  void leave(int rank);

 private:
  struct Round {
    explicit Round(size_t num_members) : calls(num_members), bytes(std::make_shared<Bytes>(num_members)) {}

    std::vector<std::optional<std::string>> calls;
    std::shared_ptr<Bytes> bytes;
    size_t num_arrived = 0;
    bool decided = false;
    std::optional<Failure> failure;  // of a decided round
  };

  struct Key {
    Lane lane;
    uint64_t number;
    auto operator<=>(const Key&) const = default;
  };

  void arrive(const Lane& lane, Round& round, int rank, Offer offer) SHARDOW_REQUIRES(mutex_);
  void fail_if_one_is_gone(const Lane& lane, Round& round) SHARDOW_REQUIRES(mutex_);
  void decide(Round& round, std::optional<Failure> failure) SHARDOW_REQUIRES(mutex_);
  void forget_finished(const Lane& lane) SHARDOW_REQUIRES(mutex_);

  base::Mutex mutex_;
  base::Condition changed_;
  std::map<Key, std::shared_ptr<Round>> rounds_ SHARDOW_GUARDED_BY(mutex_);      // that some member may still come to
  std::vector<std::map<Lane, uint64_t>> next_round_ SHARDOW_GUARDED_BY(mutex_);  // per rank
  std::vector<bool> gone_ SHARDOW_GUARDED_BY(mutex_);
};

}  // namespace shardow::comm
