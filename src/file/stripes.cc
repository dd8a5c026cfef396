#include "file/stripes.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "file/feed.h"
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
  for (const size_t t : layout.files()[file].content.tensors) {
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

}  // namespace shardow::file
