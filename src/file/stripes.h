// Short runs go to files as stripes, in two phases (Thakur, Gropp, Lusk: Data sieving and collective I/O in ROMIO,
// 1999): ranks give what they have of a stripe to its owner, who writes it whole. Files see writes of megabytes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/parts.h"
#include "file/feed.h"
#include "file/layout.h"
#include "file/output.h"
#include "shardow/group.h"

namespace shardow::file {

inline constexpr int64_t kStripeBytes = int64_t{8} << 20;
inline constexpr int64_t kLongRunBytes =
    int64_t{64} << 10;  ///< from here on a rank writes its runs itself as fast as somebody else would

/// Elements [begin, end) of a tensor, which begin at byte `at` of the stripe.
struct Segment {
  size_t tensor;
  int64_t begin, end, at;
};

struct Stripe {
  size_t file;
  std::vector<Segment> segments;
  int64_t bytes = 0;
  int owner = 0;
};

/// By tensor: several ranks have it, in runs that are short on average. Such tensors go through stripes.
std::vector<bool> have_short_runs(const Layout& layout);

/// The stripes of the chosen tensors, in files' order, in rounds: in one round every rank owns one at most. Each is
/// owned by a rank that has some of it, or with `sequential` by the one that writes its file, front to end; then every
/// file has a stripe. The same on every rank.
std::vector<std::vector<Stripe>> plan_rounds(const Layout& layout, const std::vector<bool>& chosen, int ranks,
                                             bool sequential);

/// Packs what ranks have of a stripe for a message, or puts it where it belongs.
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

/// Gathers stripes on the ranks that own them, and writes them.
class StripeWriter {
 public:
  /// `mine`, ascending by tensor and in owners()' order, outlives it. `sequential`: files are made here, and
  /// were counted before.
  StripeWriter(Group& group, std::chrono::milliseconds timeout, const std::vector<Mine>& mine, const Layout& layout,
               Output& output, std::vector<std::vector<Stripe>> rounds, bool sequential);

  comm::Part round();  ///< one stripe of every rank; each rank must have ended the one before well

 private:
  void give(const Stripe& stripe);
  void take(const Stripe& stripe, int rank, int64_t bytes);
  void write(const Stripe& stripe);

  Group& group_;
  std::chrono::milliseconds timeout_;
  const Layout& layout_;
  Output& output_;
  std::vector<std::vector<Stripe>> rounds_;
  bool sequential_;
  StripeParts parts_;
  std::vector<std::byte> stripe_, message_;  // this rank's stripe; its parts of another's, or another's of it
  Deadline deadline_;                        // of this round's messages
  size_t next_ = 0;
};

}  // namespace shardow::file
