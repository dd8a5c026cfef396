// What ranks have of a stripe: packed one after another for a message, or put where it belongs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "file/feed.h"
#include "file/layout.h"
#include "file/stripes.h"

namespace shardow::file {

class StripeParts {
 public:
  /// Of rank `rank` among `num_ranks`. `mine`, ascending by tensor and in owners()' order, and `layout` outlive it.
  StripeParts(int rank, int num_ranks, const std::vector<Mine>& mine, const Layout& layout)
      : rank_(rank), num_ranks_(num_ranks), mine_(mine), layout_(layout) {}

  std::vector<int64_t> bytes_by_rank(const Stripe& stripe) const;

  /// This rank's parts to their places in the stripe.
  void deposit(const Stripe& stripe, std::span<std::byte> target);

  /// This rank's parts, one after another, in place of what `message` held.
  void pack(const Stripe& stripe, std::vector<std::byte>& message);

  /// What another rank has packed, to its places in the stripe.
  void unpack(const Stripe& stripe, int rank, std::span<const std::byte> message, std::span<std::byte> target) const;

 private:
  const Mine& mine_of(size_t tensor, size_t piece) const;

  int rank_, num_ranks_;
  const std::vector<Mine>& mine_;
  const Layout& layout_;
  Feed feed_;
};

}  // namespace shardow::file
