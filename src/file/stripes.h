// Stretches of files that one rank writes whole, from what all ranks have of them.
#pragma once

#include <cstdint>
#include <vector>

#include "file/layout.h"

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

}  // namespace shardow::file
