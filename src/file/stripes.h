// Short runs go to files as stripes, in two phases (Thakur, Gropp, Lusk: Data sieving and collective I/O in ROMIO,
// 1999): ranks give what they have of a stripe to its owner, who writes it whole. Files see writes of megabytes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "file/feed.h"
#include "file/layout.h"
#include "file/output.h"
#include "group/collective_call.h"
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

/// Gathers stripes on the ranks that own them, and writes them.
class StripeWriter {
 public:
  /// `mine`, ascending by tensor and in owners()' order, outlives it. `sequential`: files are made here, and
  /// were counted before.
  StripeWriter(Group& group, std::chrono::milliseconds timeout, const std::vector<Mine>& mine, const Layout& layout,
               Output& output, std::vector<std::vector<Stripe>> rounds, bool sequential);

  group::Part round();  ///< one stripe of every rank; each rank must have ended the one before well

 private:
  std::vector<int64_t> bytes_by_rank(const Stripe& stripe) const;
  std::span<const std::byte> data_of(const Segment& segment, size_t piece, int64_t begin, int64_t end);
  void deposit(const Stripe& stripe);
  void give(const Stripe& stripe);
  void take(const Stripe& stripe, int rank, int64_t bytes);
  void write(const Stripe& stripe);

  Group& group_;
  std::chrono::milliseconds timeout_;
  const std::vector<Mine>& mine_;
  const Layout& layout_;
  Output& output_;
  std::vector<std::vector<Stripe>> rounds_;
  bool sequential_;
  Feed feed_;
  std::vector<std::byte> stripe_, message_;  // this rank's stripe; its parts of another's, or another's of it
  Deadline deadline_;                        // of this round's messages
  size_t next_ = 0;
};

}  // namespace shardow::file
