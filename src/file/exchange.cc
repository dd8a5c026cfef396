#include "file/exchange.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "base/errors.h"
#include "file/wire.h"

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
void scatter(const Segment& segment, const Owned& owned, int64_t begin, int64_t end, const Entry& entry, const std::byte* from,
             std::span<std::byte> stripe) {
  owned.region.window(begin, end).for_each_run([&](const Run& run) {
    std::byte* const to = stripe.data() + segment.at + bytes_of(run.global_begin - segment.begin, entry);
    std::memcpy(to, from + bytes_of(run.local_begin, entry), static_cast<size_t>(bytes_of(run.length, entry)));
  });
}

constexpr size_t kNonceBytes = 16;

}  // namespace

Exchange::Exchange(Group& group, std::chrono::milliseconds timeout, const std::vector<Mine>& mine, const Layout& layout, Output& output,
                   std::vector<std::vector<Stripe>> rounds, bool sequential)
    : group_(group),
      timeout_(timeout),
      mine_(mine),
      layout_(layout),
      output_(output),
      rounds_(std::move(rounds)),
      sequential_(sequential),
      of_(static_cast<size_t>(group.size())),
      reached_by_(static_cast<size_t>(group.size()), false) {
  if (!rounds_.empty() && group.size() > 1) share_memory();
  if (!own_) alone_.resize(static_cast<size_t>(rounds_.empty() ? 0 : kStripeBytes));
  stripe_ = own_ ? own_->bytes() : std::span(alone_);
}

/// Every rank offers its stripe, and says whose it has found. A nonce tells whether an address led to the right memory.
void Exchange::share_memory() {
  std::random_device random;
  std::string nonce;
  while (nonce.size() < kNonceBytes) nonce += fmt::format("{:08x}", random());
  Sender offer;
  try {
    own_ = base::SharedMemory::create(static_cast<size_t>(kStripeBytes));
    std::memcpy(own_->bytes().data(), nonce.data(), kNonceBytes);
    offer.text(own_->address());
    offer.text(nonce);
  } catch (const Error&) {  // then what others have is sent
    offer.text("");
    offer.text("");
  }
  const std::vector<std::string> offers = group_.all_gather(offer.bytes(), std::chrono::steady_clock::now() + timeout_);
  std::string found;
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    Receiver in(offers[rank]);
    const std::string address = in.text(), expected = in.text();
    if (static_cast<int>(rank) != group_.rank() && !address.empty())
      of_[rank] = base::SharedMemory::open(address, static_cast<size_t>(kStripeBytes));
    if (of_[rank] && std::memcmp(of_[rank]->bytes().data(), expected.data(), kNonceBytes) != 0) of_[rank].reset();
    found += of_[rank] ? '1' : '0';
  }
  const std::vector<std::string> all = group_.all_gather(found, std::chrono::steady_clock::now() + timeout_);
  for (size_t rank = 0; rank < all.size(); ++rank) reached_by_[rank] = all[rank].at(static_cast<size_t>(group_.rank())) == '1';
}

Part Exchange::round() {
  if (next_ == rounds_.size()) return {0, true};
  deadline_ = std::chrono::steady_clock::now() + timeout_ * 3 / 4;  // who waited in vain is in time to say so
  const std::vector<Stripe>& stripes = rounds_[next_++];
  const auto own = std::find_if(stripes.begin(), stripes.end(), [&](const Stripe& one) { return one.owner == group_.rank(); });
  const Stripe* const mine = own == stripes.end() ? nullptr : &*own;
  if (mine != nullptr) deposit(*mine, stripe_);
  trade(stripes, mine);
  if (mine != nullptr) write(*mine);
  return {mine != nullptr ? mine->bytes : 0, next_ == rounds_.size()};
}

/// Pairs of ranks, every rank in one pair at a time, the lower one first: nobody waits in a circle.
void Exchange::trade(const std::vector<Stripe>& stripes, const Stripe* own) {
  const std::vector<int64_t> expected = own != nullptr ? bytes_by_rank(*own) : std::vector<int64_t>(static_cast<size_t>(group_.size()), 0);
  const auto send = [&](int to) {
    const auto stripe = std::find_if(stripes.begin(), stripes.end(), [&](const Stripe& one) { return one.owner == to; });
    if (stripe != stripes.end()) give(*stripe);
  };
  const auto receive = [&](int from) {
    if (expected[static_cast<size_t>(from)] > 0) take(*own, from, expected[static_cast<size_t>(from)]);
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

/// What this rank has of another's stripe: into its memory, followed by a word that it is there, or as a message.
void Exchange::give(const Stripe& stripe) {
  if (bytes_by_rank(stripe)[static_cast<size_t>(group_.rank())] == 0) return;
  if (const auto& target = of_[static_cast<size_t>(stripe.owner)]) {
    deposit(stripe, target->bytes());
    message_.assign(1, std::byte{1});
  } else {
    pack(stripe);
  }
  group_.send(message_, stripe.owner, deadline_);
}

void Exchange::take(const Stripe& stripe, int rank, int64_t bytes) {
  const bool is_there = reached_by_[static_cast<size_t>(rank)];
  message_.resize(is_there ? 1 : static_cast<size_t>(bytes));
  group_.recv(message_, rank, deadline_);
  if (!is_there) unpack(stripe, rank);
}

std::vector<int64_t> Exchange::bytes_by_rank(const Stripe& stripe) const {
  std::vector<int64_t> bytes(static_cast<size_t>(group_.size()), 0);
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    bytes[static_cast<size_t>(owned.rank)] += bytes_of(end - begin, layout_.place(segment.tensor).entry);
  });
  return bytes;
}

const Mine& Exchange::part(size_t tensor, size_t piece) const {
  const auto first = std::lower_bound(mine_.begin(), mine_.end(), tensor, [](const Mine& a, size_t t) { return a.tensor < t; });
  return *std::find_if(first, mine_.end(), [&](const Mine& one) { return one.piece == piece; });
}

void Exchange::deposit(const Stripe& stripe, std::span<std::byte> target) {
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != group_.rank()) return;
    const Entry& entry = layout_.place(segment.tensor).entry;
    const auto data = feed_.get(part(segment.tensor, owned.piece), begin, end, entry.dtype);
    scatter(segment, owned, begin, end, entry, data.data(), target);
  });
}

/// This rank's parts, one after another.
void Exchange::pack(const Stripe& stripe) {
  message_.clear();
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != group_.rank()) return;
    const auto data = feed_.get(part(segment.tensor, owned.piece), begin, end, layout_.place(segment.tensor).entry.dtype);
    message_.insert(message_.end(), data.begin(), data.end());
  });
}

void Exchange::unpack(const Stripe& stripe, int rank) {
  const std::byte* from = message_.data();
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != rank) return;
    const Entry& entry = layout_.place(segment.tensor).entry;
    scatter(segment, owned, begin, end, entry, from, stripe_);
    from += bytes_of(end - begin, entry);
  });
}

void Exchange::write(const Stripe& stripe) {
  if (sequential_) output_.begin_file(stripe.file);
  for (const Segment& segment : stripe.segments) {
    const Entry& entry = layout_.place(segment.tensor).entry;
    const int64_t begin = bytes_of(segment.begin, entry), bytes = bytes_of(segment.end, entry) - begin;
    const auto data = stripe_.subspan(static_cast<size_t>(segment.at), static_cast<size_t>(bytes));
    if (!sequential_) output_.count(segment.tensor, begin, data);
    output_.write(segment.tensor, begin, data);
  }
}

}  // namespace shardow::file
