#include "file/stripes.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/turns.h"
#include "file/feed.h"
#include "group/ranks.h"
#include "tensor/dtype.h"
#include "tensor/runs.h"

namespace shardow::file {
namespace {

/// Estimated by each part's first run: counting them all would walk the whole model.
bool runs_are_short(const Layout& layout, size_t tensor) {
  const DType dtype = layout.place(tensor).entry.dtype;
  std::set<int> ranks;
  int64_t runs = 0, elements = 0;
  for (const Owned& owned : layout.owners(tensor)) {
    const std::optional<Run> first = RunCursor(owned.region).next();
    if (!first) continue;
    ranks.insert(owned.rank);
    elements += owned.region.size();
    runs += (owned.region.size() + first->length - 1) / first->length;
  }
  return ranks.size() > 1 && elements * dtype_bits(dtype) / 8 < runs * kLongRunBytes;
}

/// Ranks that have some of the segment, ascending.
std::vector<int> ranks_in(const Segment& segment, const Layout& layout) {
  std::set<int> ranks;
  for (const Owned& owned : layout.owners(segment.tensor)) {
    if (owned.region.position(segment.begin) < owned.region.position(segment.end)) ranks.insert(owned.rank);
  }
  return {ranks.begin(), ranks.end()};
}

/// Cuts one file's tensors.
std::vector<Stripe> stripes_of(const Layout& layout, size_t file, const std::vector<bool>& chosen) {
  std::vector<Stripe> stripes(1);
  for (const size_t t : layout.files()[file].tensors) {
    if (!chosen[t]) continue;
    const Entry& entry = layout.place(t).entry;
    const int64_t elements = (entry.end - entry.begin) * 8 / dtype_bits(entry.dtype);
    for (int64_t begin = 0; begin < elements;) {
      const int64_t room = (kStripeBytes - stripes.back().bytes) * 8 / dtype_bits(entry.dtype) / 16 * 16;
      if (room <= 0) {
        stripes.emplace_back();
        continue;
      }
      const int64_t end = std::min(elements, begin + room);
      stripes.back().segments.push_back({t, begin, end, stripes.back().bytes});
      stripes.back().bytes += bytes_of(end, entry) - bytes_of(begin, entry);
      begin = end;
    }
  }
  for (Stripe& stripe : stripes) stripe.file = file;
  return stripes;
}

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

const Stripe* owned_by(int rank, const std::vector<Stripe>& stripes) {
  const auto found = std::find_if(stripes.begin(), stripes.end(), [&](const Stripe& one) { return one.owner == rank; });
  return found == stripes.end() ? nullptr : &*found;
}

/// Calls send(partner) and receive(partner) for every other rank. The lower rank of a pair sends first, so that nobody
/// waits in a circle.
template <class Send, class Receive>
void with_each_partner(int rank, int num_ranks, Send send, Receive receive) {
  const int rounded = static_cast<int>(std::bit_ceil(static_cast<unsigned>(num_ranks)));
  for (int k = 1; k < rounded; ++k) {
    const int partner = rank ^ k;
    if (partner >= num_ranks) continue;
    if (rank < partner) {
      send(partner);
      receive(partner);
    } else {
      receive(partner);
      send(partner);
    }
  }
}

}  // namespace

std::vector<bool> have_short_runs(const Layout& layout) {
  std::vector<bool> chosen;
  std::map<std::tuple<const void*, DType, DType>, bool> found;  // for tensors that are held alike
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    const Shared& tensor = layout.tensors()[t];
    const auto [at, is_new] = found.try_emplace({tensor.pieces.id(), tensor.dtype, layout.place(t).entry.dtype});
    if (is_new) at->second = runs_are_short(layout, t);
    chosen.push_back(at->second);
  }
  return chosen;
}

std::vector<std::vector<Stripe>> plan_rounds(const Layout& layout, const std::vector<bool>& chosen, int ranks,
                                             bool sequential) {
  std::vector<std::vector<Stripe>> rounds;
  std::vector<size_t> next(static_cast<size_t>(ranks), 0);  // by rank: the first round in which it owns nothing yet
  size_t turn = 0;
  for (size_t f = 0; f < layout.files().size(); ++f) {
    for (Stripe& stripe : stripes_of(layout, f, chosen)) {
      if (stripe.segments.empty() && !sequential) continue;
      if (sequential) {
        stripe.owner = static_cast<int>(f % static_cast<size_t>(ranks));
      } else {
        const std::vector<int> able = ranks_in(stripe.segments[0], layout);
        stripe.owner = able[turn++ % able.size()];
      }
      const size_t round = next[static_cast<size_t>(stripe.owner)]++;
      if (round == rounds.size()) rounds.emplace_back();
      rounds[round].push_back(std::move(stripe));
    }
  }
  return rounds;
}

StripeWriter::StripeWriter(Group& group, std::chrono::milliseconds timeout, const std::vector<Mine>& mine,
                           const Layout& layout, Output& output, std::vector<std::vector<Stripe>> rounds,
                           bool sequential)
    : group_(group),
      timeout_(timeout),
      mine_(mine),
      layout_(layout),
      output_(output),
      rounds_(std::move(rounds)),
      sequential_(sequential) {}

group::Part StripeWriter::round() {
  if (next_ == rounds_.size()) return {0, true};
  deadline_ = base::after(timeout_ - timeout_ / 4);  // who waited in vain is in time to say so
  const std::vector<Stripe>& stripes = rounds_[next_++];
  const Stripe* const own = owned_by(group_.rank(), stripes);
  if (own != nullptr) {
    stripe_.resize(static_cast<size_t>(own->bytes));
    deposit(*own);
  }
  const std::vector<int64_t> expected =
      own != nullptr ? bytes_by_rank(*own) : std::vector<int64_t>(static_cast<size_t>(group_.size()), 0);
  with_each_partner(
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

std::vector<int64_t> StripeWriter::bytes_by_rank(const Stripe& stripe) const {
  std::vector<int64_t> bytes(static_cast<size_t>(group_.size()), 0);
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    bytes[static_cast<size_t>(owned.rank)] += bytes_of(end - begin, layout_.place(segment.tensor).entry);
  });
  return bytes;
}

/// Returns elements [begin, end) of this rank's part.
std::span<const std::byte> StripeWriter::data_of(const Segment& segment, size_t piece, int64_t begin, int64_t end) {
  const auto first = std::lower_bound(mine_.begin(), mine_.end(), segment.tensor,
                                      [](const Mine& a, size_t t) { return a.tensor < t; });
  const Mine& mine = *std::find_if(first, mine_.end(), [&](const Mine& one) { return one.piece == piece; });
  return feed_.get(mine, begin, end, layout_.place(segment.tensor).entry.dtype);
}

/// Puts this rank's parts to their places in its stripe.
void StripeWriter::deposit(const Stripe& stripe) {
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != group_.rank()) return;
    const auto data = data_of(segment, owned.piece, begin, end);
    scatter(segment, owned, begin, end, layout_.place(segment.tensor).entry, data.data(), stripe_);
  });
}

/// Sends this rank's parts of a stripe, one after another, to the stripe's owner.
void StripeWriter::give(const Stripe& stripe) {
  if (bytes_by_rank(stripe)[static_cast<size_t>(group_.rank())] == 0) return;
  message_.clear();
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != group_.rank()) return;
    const auto data = data_of(segment, owned.piece, begin, end);
    message_.insert(message_.end(), data.begin(), data.end());
  });
  group::ranks_of(group_).send(message_, stripe.owner, deadline_);
}

/// Receives the parts of another rank, `bytes` in all, and puts them into this rank's stripe.
void StripeWriter::take(const Stripe& stripe, int rank, int64_t bytes) {
  message_.resize(static_cast<size_t>(bytes));
  group::ranks_of(group_).recv(message_, rank, deadline_);
  const std::byte* from = message_.data();
  for_each_part(stripe, layout_, [&](const Segment& segment, const Owned& owned, int64_t begin, int64_t end) {
    if (owned.rank != rank) return;
    const Entry& entry = layout_.place(segment.tensor).entry;
    scatter(segment, owned, begin, end, entry, from, stripe_);
    from += bytes_of(end - begin, entry);
  });
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
