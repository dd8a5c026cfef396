#include "file/ownership.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/errors.h"
#include "tensor/coverage.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using base::fail;

constexpr int64_t kDivideBytes = int64_t{1} << 20;  // pieces below are written by one holder

std::string where_text(const Shape& shape, int64_t element) {
  std::vector<int64_t> at(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    at[d] = element % shape[d];
    element /= shape[d];
  }
  return fmt::format("[{}]", fmt::join(at, ", "));
}

}  // namespace

Shared::Pieces::Pieces(std::vector<Piece> all) {
  std::vector<std::pair<int, size_t>> by_rank;
  for (size_t p = 0; p < all.size(); ++p) {
    for (const int rank : all[p].holders) by_rank.emplace_back(rank, p);
  }
  std::sort(by_rank.begin(), by_rank.end());
  all_ = std::make_shared<const std::vector<Piece>>(std::move(all));
  by_rank_ = std::make_shared<const std::vector<std::pair<int, size_t>>>(std::move(by_rank));
}

std::vector<size_t> Shared::Pieces::held_by(int rank) const {
  std::vector<size_t> held;
  for (auto at = std::lower_bound(by_rank_->begin(), by_rank_->end(), std::pair(rank, size_t{0}));
       at != by_rank_->end() && at->first == rank; ++at)
    held.push_back(at->second);
  return held;
}

void check_whole(const std::vector<Shared>& tensors) {
  std::set<std::pair<const void*, Shape>> whole;  // the shape too: of several ones nobody may have any element
  for (const Shared& tensor : tensors) {
    if (!whole.emplace(tensor.pieces.id(), tensor.shape).second) continue;
    const std::vector<Region> regions = regions_of(tensor);
    int64_t where = 0;
    if (!covers(regions, &where))
      fail(Code::kInvalidArgument, "'{}': no rank holds element {}", tensor.name, where_text(tensor.shape, where));
    if (!covers_once(regions, &where)) {
      fail(Code::kInvalidArgument,
           "'{}': element {} belongs to two different pieces; ranks must hold equal or disjoint ones", tensor.name,
           where_text(tensor.shape, where));
    }
  }
}

std::optional<size_t> Finder::find(std::string_view name) {
  if (next_ < tensors_.size() && tensors_[next_].name == name) return next_++;
  const auto before = [](const Shared& a, std::string_view b) { return a.name < b; };
  const auto found = std::lower_bound(tensors_.begin(), tensors_.end(), name, before);
  if (found == tensors_.end() || found->name != name) return std::nullopt;
  next_ = static_cast<size_t>(found - tensors_.begin()) + 1;
  return next_ - 1;
}

std::vector<Owned> owners(const Shared& tensor, size_t turn, std::optional<int> rank) {
  std::vector<size_t> pieces(tensor.pieces.size());
  std::iota(pieces.begin(), pieces.end(), size_t{0});
  if (rank) pieces = tensor.pieces.held_by(*rank);
  std::vector<Owned> all;
  for (const size_t p : pieces) {
    const auto& [region, holders] = tensor.pieces[p];
    const auto count = static_cast<int>(holders.size());
    if (count == 1 || region.size() * dtype_bits(tensor.dtype) / 8 < kDivideBytes) {
      const int holder = holders[turn % holders.size()];
      if (!rank || *rank == holder) all.push_back({p, holder, region, 0});
      continue;
    }
    int64_t begin = 0;
    for (int i = 0; i < count; ++i) {
      const int holder = holders[static_cast<size_t>(i)];
      Region part = region.part(i, count);
      const int64_t size = part.size();
      if (!rank || *rank == holder) all.push_back({p, holder, part, begin});
      begin += size;
    }
  }
  return all;
}

std::vector<Region> regions_of(const Shared& tensor) {
  std::vector<Region> regions = {Region::whole(tensor.shape).window(0, 0)};
  for (const Shared::Piece& piece : tensor.pieces) regions.push_back(piece.region);
  return regions;
}

}  // namespace shardow::file
