#include "file/stripe_parts.h"

#include <algorithm>
#include <cstring>

namespace shardow::file {
namespace {

/// Calls fn(segment, owned, begin, end) for every part that a rank has of the stripe: elements [begin, end) of `owned`.
template <class Fn>
void for_each_part(const Stripe& stripe, const Layout& layout, Fn fn) {
  for (const Segment& segment : stripe.segments) {
    for (const Owned& owned : layout.owners(segment.tensor)) {
      const int64_t begin = owned.region.position(segment.begin), end = owned.region.position(segment.end);
      if (begin < end) fn(segment, owned, begin, end);
    }
  }
}

/// Elements [begin, end) of a rank's part, which lie one after another from `from`, run by run to where they belong.
void scatter(const Segment& segment, const Owned& owned, int64_t begin, int64_t end, const Entry& entry,
             const std::byte* from, std::span<std::byte> stripe) {
  owned.region.window(begin, end).for_each_run([&](const Run& run) {
    std::byte* const to = stripe.data() + segment.at + bytes_of(run.global_begin - segment.begin, entry);
    std::memcpy(to, from + bytes_of(run.local_begin, entry), static_cast<size_t>(bytes_of(run.length, entry)));
  });
}

}  // namespace

std::vector<int64_t> StripeParts::bytes_by_rank(const Stripe& stripe) const {
  std::vector<int64_t> bytes(static_cast<size_t>(num_ranks_), 0);
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    bytes[static_cast<size_t>(owned.rank)] += bytes_of(end - begin, layout_.place(segment.tensor).entry);
  });
  return bytes;
}

const Mine& StripeParts::mine_of(size_t tensor, size_t piece) const {
  const auto first =
      std::lower_bound(mine_.begin(), mine_.end(), tensor, [](const Mine& a, size_t t) { return a.tensor < t; });
  return *std::find_if(first, mine_.end(), [&](const Mine& one) { return one.piece == piece; });
}

void StripeParts::deposit(const Stripe& stripe, std::span<std::byte> target) {
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != rank_) return;
    const Entry& entry = layout_.place(segment.tensor).entry;
    const auto data = feed_.get(mine_of(segment.tensor, owned.piece), begin, end, entry.dtype);
    scatter(segment, owned, begin, end, entry, data.data(), target);
  });
}

void StripeParts::pack(const Stripe& stripe, std::vector<std::byte>& message) {
  message.clear();
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != rank_) return;
    const auto data =
        feed_.get(mine_of(segment.tensor, owned.piece), begin, end, layout_.place(segment.tensor).entry.dtype);
    message.insert(message.end(), data.begin(), data.end());
  });
}

void StripeParts::unpack(const Stripe& stripe, int rank, std::span<const std::byte> message,
                         std::span<std::byte> target) const {
  const std::byte* from = message.data();
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != rank) return;
    const Entry& entry = layout_.place(segment.tensor).entry;
    scatter(segment, owned, begin, end, entry, from, target);
    from += bytes_of(end - begin, entry);
  });
}

}  // namespace shardow::file
