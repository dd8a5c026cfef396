#include "file/exchange.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "tensor/dtype.h"

namespace shardow::file {
namespace {

/// Calls fn(segment, owned, begin, end) for every part that a rank has of the stripe: elements [begin, end) of `owned`.
template <class Fn>
void for_each_part(const Stripe& stripe, const Layout& layout, Fn fn) {
  for (const Segment& segment : stripe.segments) {
    for (const Owned& owned : owners(layout.tensors()[segment.tensor], segment.tensor)) {
      const int64_t begin = owned.region.position(segment.begin), end = owned.region.position(segment.end);
      if (begin < end) fn(segment, owned, begin, end);
    }
  }
}

}  // namespace

Exchange::Exchange(Group& group, std::chrono::milliseconds timeout, const std::vector<Mine>& mine, const Layout& layout, Output& output,
                   std::vector<std::vector<Stripe>> rounds, bool sequential)
    : group_(group),
      timeout_(timeout),
      mine_(mine),
      layout_(layout),
      output_(output),
      rounds_(std::move(rounds)),
      sequential_(sequential) {}

Part Exchange::round() {
  if (next_ == rounds_.size()) return {0, true};
  const std::vector<Stripe>& stripes = rounds_[next_++];
  const auto own = std::find_if(stripes.begin(), stripes.end(), [&](const Stripe& one) { return one.owner == group_.rank(); });
  const Stripe* const mine = own == stripes.end() ? nullptr : &*own;
  if (mine != nullptr) {
    stripe_.resize(static_cast<size_t>(mine->bytes));
    place(*mine, group_.rank(), pack(*mine));
  }
  trade(stripes, mine);
  if (mine != nullptr) write(*mine);
  return {mine != nullptr ? mine->bytes : 0, next_ == rounds_.size()};
}

std::vector<int64_t> Exchange::bytes_by_rank(const Stripe& stripe) const {
  std::vector<int64_t> bytes(static_cast<size_t>(group_.size()), 0);
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    bytes[static_cast<size_t>(owned.rank)] += bytes_of(end - begin, layout_.place(segment.tensor).entry);
  });
  return bytes;
}

/// What this rank has of a stripe: its parts one after another.
std::vector<std::byte> Exchange::pack(const Stripe& stripe) {
  std::vector<std::byte> message(static_cast<size_t>(bytes_by_rank(stripe)[static_cast<size_t>(group_.rank())]));
  std::byte* to = message.data();
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != group_.rank()) return;
    const auto first = std::lower_bound(mine_.begin(), mine_.end(), segment.tensor, [](const Mine& a, size_t t) { return a.tensor < t; });
    const auto mine = std::find_if(first, mine_.end(), [&](const Mine& one) { return one.piece == owned.piece; });
    const Entry& entry = layout_.place(segment.tensor).entry;
    feed_.copy(*mine, begin, end, entry.dtype, to);
    to += bytes_of(end - begin, entry);
  });
  return message;
}

/// A rank's parts, run by run, to where they belong in this rank's stripe.
void Exchange::place(const Stripe& stripe, int rank, std::span<const std::byte> message) {
  const std::byte* from = message.data();
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != rank) return;
    const Entry& entry = layout_.place(segment.tensor).entry;
    owned.region.window(begin, end).for_each_run([&](const Run& run) {
      std::byte* const to = stripe_.data() + segment.at + bytes_of(run.global_begin - segment.begin, entry);
      std::memcpy(to, from + bytes_of(run.local_begin, entry), static_cast<size_t>(bytes_of(run.length, entry)));
    });
    from += bytes_of(end - begin, entry);
  });
}

/// Pairs of ranks, every rank in one pair at a time, the lower one first: nobody waits in a circle.
void Exchange::trade(const std::vector<Stripe>& stripes, const Stripe* own) {
  const auto deadline = [&] { return std::chrono::steady_clock::now() + timeout_; };
  const std::vector<int64_t> expected = own != nullptr ? bytes_by_rank(*own) : std::vector<int64_t>(static_cast<size_t>(group_.size()), 0);
  const auto send = [&](int to) {
    const auto stripe = std::find_if(stripes.begin(), stripes.end(), [&](const Stripe& one) { return one.owner == to; });
    if (stripe == stripes.end()) return;
    if (const std::vector<std::byte> message = pack(*stripe); !message.empty()) group_.send(message, to, deadline());
  };
  const auto receive = [&](int from) {
    if (expected[static_cast<size_t>(from)] == 0) return;
    received_.resize(static_cast<size_t>(expected[static_cast<size_t>(from)]));
    group_.recv(received_, from, deadline());
    place(*own, from, received_);
  };
  const int rank = group_.rank(), rounded = static_cast<int>(std::bit_ceil(static_cast<unsigned>(group_.size())));
  for (int k = 1; k < rounded; ++k) {
    const int partner = rank ^ k;
    if (partner >= group_.size()) continue;
    if (rank < partner) {
      send(partner);
      receive(partner);
    } else {
      receive(partner);
      send(partner);
    }
  }
}

void Exchange::write(const Stripe& stripe) {
  if (sequential_) output_.begin_file(stripe.file);
  for (const Segment& segment : stripe.segments) {
    const Entry& entry = layout_.place(segment.tensor).entry;
    const int64_t begin = bytes_of(segment.begin, entry), bytes = bytes_of(segment.end, entry) - begin;
    const auto data = std::span<const std::byte>(stripe_).subspan(static_cast<size_t>(segment.at), static_cast<size_t>(bytes));
    if (!sequential_) output_.count(segment.tensor, begin, data);
    output_.write(segment.tensor, begin, data);
  }
}

}  // namespace shardow::file
