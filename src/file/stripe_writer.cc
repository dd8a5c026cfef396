#include "file/stripe_writer.h"

#include <algorithm>
#include <utility>

#include "base/turns.h"
#include "comm/pairs.h"

namespace shardow::file {
namespace {

const Stripe* owned_by(int rank, const std::vector<Stripe>& stripes) {
  const auto found = std::find_if(stripes.begin(), stripes.end(), [&](const Stripe& one) { return one.owner == rank; });
  return found == stripes.end() ? nullptr : &*found;
}

}  // namespace

StripeWriter::StripeWriter(Group& group, std::chrono::milliseconds timeout, const std::vector<Mine>& mine,
                           const Layout& layout, Output& output, std::vector<std::vector<Stripe>> rounds,
                           bool sequential)
    : group_(group),
      timeout_(timeout),
      layout_(layout),
      output_(output),
      rounds_(std::move(rounds)),
      sequential_(sequential),
      parts_(group.rank(), group.size(), mine, layout) {}

comm::Part StripeWriter::round() {
  if (next_ == rounds_.size()) return {0, true};
  deadline_ = base::now() + timeout_ * 3 / 4;  // who waited in vain is in time to say so
  const std::vector<Stripe>& stripes = rounds_[next_++];
  const Stripe* const own = owned_by(group_.rank(), stripes);
  if (own != nullptr) {
    stripe_.resize(static_cast<size_t>(own->bytes));
    parts_.deposit(*own, stripe_);
  }
  const std::vector<int64_t> expected =
      own != nullptr ? parts_.bytes_by_rank(*own) : std::vector<int64_t>(static_cast<size_t>(group_.size()), 0);
  comm::with_each_partner(
      group_.rank(), group_.size(),
      [&](int to) {
        if (const Stripe* const stripe = owned_by(to, stripes)) give(*stripe);
      },
      [&](int from) {
        if (const int64_t bytes = expected[static_cast<size_t>(from)]; bytes > 0) take(*own, from, bytes);
      });
  if (own != nullptr) write(*own);
  return {own != nullptr ? own->bytes : 0, next_ == rounds_.size()};
}

/// Sends this rank's parts of a stripe to the stripe's owner.
void StripeWriter::give(const Stripe& stripe) {
  if (parts_.bytes_by_rank(stripe)[static_cast<size_t>(group_.rank())] == 0) return;
  parts_.pack(stripe, message_);
  group_.send(message_, stripe.owner, deadline_);
}

/// Receives the parts of another rank, `bytes` in all, and puts them into this rank's stripe.
void StripeWriter::take(const Stripe& stripe, int rank, int64_t bytes) {
  message_.resize(static_cast<size_t>(bytes));
  group_.recv(message_, rank, deadline_);
  parts_.unpack(stripe, rank, message_, stripe_);
}

void StripeWriter::write(const Stripe& stripe) {
  if (sequential_) output_.begin_file(stripe.file);
  for (const Segment& segment : stripe.segments) {
    const Entry& entry = layout_.place(segment.tensor).entry;
    const int64_t begin = bytes_of(segment.begin, entry), bytes = bytes_of(segment.end, entry) - begin;
    const auto data = std::span(stripe_).subspan(static_cast<size_t>(segment.at), static_cast<size_t>(bytes));
    if (!sequential_) output_.count(segment.tensor, begin, data);
    output_.write(segment.tensor, begin, data);
  }
}

}  // namespace shardow::file
