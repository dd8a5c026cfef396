#include "file/plan.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "base/errors.h"
#include "file/wire.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using base::fail;

constexpr int64_t kDivideBytes = int64_t{1} << 20;  // pieces below are written by one holder

std::string describe(std::span<const TensorView> views) {
  Sender out;
  for (const TensorView& view : views) {
    out.text(view.name);
    out.number(static_cast<int64_t>(view.dtype));
    out.text(view.region.encode());
  }
  return out.bytes();
}

void add(std::map<std::string, Shared>& all, int rank, const std::string& name, DType dtype, const Region& region) {
  const auto [found, is_new] = all.try_emplace(name, Shared{name, dtype, region.shape(), {}});
  Shared& tensor = found->second;
  if (tensor.dtype != dtype) {
    fail(Code::kInvalidArgument, "'{}' is {} on rank {} and {} before it; every rank must hold the same tensors", name, dtype_name(dtype),
         rank, dtype_name(tensor.dtype));
  }
  if (tensor.shape != region.shape()) {
    fail(Code::kInvalidArgument, "'{}' has shape [{}] on rank {} and [{}] before it; every rank must hold the same tensors", name,
         fmt::join(region.shape(), ", "), rank, fmt::join(tensor.shape, ", "));
  }
  if (region.size() == 0) return;
  const auto same =
      std::find_if(tensor.pieces.begin(), tensor.pieces.end(), [&](const Shared::Piece& piece) { return piece.region == region; });
  if (same == tensor.pieces.end()) {
    tensor.pieces.push_back({region, {rank}});
  } else if (same->holders.back() == rank) {
    fail(Code::kInvalidArgument, "'{}' is there twice on rank {}", name, rank);
  } else {
    same->holders.push_back(rank);
  }
}

std::string where_text(const Shape& shape, int64_t element) {
  std::vector<int64_t> at(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    at[d] = element % shape[d];
    element /= shape[d];
  }
  return fmt::format("[{}]", fmt::join(at, ", "));
}

}  // namespace

std::vector<Shared> exchange(Group& group, std::span<const TensorView> views, Deadline deadline) {
  std::map<std::string, Shared> all;
  const std::vector<std::string> described = group.all_gather(describe(views), deadline);
  for (size_t rank = 0; rank < described.size(); ++rank) {
    Receiver in(described[rank]);
    while (!in.done()) {
      const std::string name = in.text();
      const auto dtype = static_cast<DType>(in.number());
      add(all, static_cast<int>(rank), name, dtype, Region::decode(in.text()));
    }
  }
  std::vector<Shared> tensors;
  tensors.reserve(all.size());
  for (auto& [name, tensor] : all) tensors.push_back(std::move(tensor));
  return tensors;
}

void check_whole(const std::vector<Shared>& tensors) {
  for (const Shared& tensor : tensors) {
    std::vector<Region> regions = {Region::whole(tensor.shape).window(0, 0)};
    for (const Shared::Piece& piece : tensor.pieces) regions.push_back(piece.region);
    int64_t where = 0;
    if (!covers(regions, &where))
      fail(Code::kInvalidArgument, "'{}': no rank holds element {}", tensor.name, where_text(tensor.shape, where));
    if (!covers_once(regions, &where)) {
      fail(Code::kInvalidArgument, "'{}': element {} belongs to two different pieces; ranks must hold equal or disjoint ones", tensor.name,
           where_text(tensor.shape, where));
    }
  }
}

std::vector<Owned> owned_by(int rank, const std::vector<Shared>& tensors, std::span<const TensorView> views) {
  std::unordered_map<std::string_view, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) index.emplace(tensors[i].name, i);
  std::vector<Owned> owned;
  for (size_t v = 0; v < views.size(); ++v) {
    const size_t t = index.at(views[v].name);
    for (const Shared::Piece& piece : tensors[t].pieces) {
      const auto me = std::find(piece.holders.begin(), piece.holders.end(), rank);
      if (me == piece.holders.end() || !(piece.region == views[v].region)) continue;
      const int count = static_cast<int>(piece.holders.size()), mine = static_cast<int>(me - piece.holders.begin());
      if (count == 1 || piece.region.size() * dtype_bits(tensors[t].dtype) / 8 < kDivideBytes) {
        if (static_cast<int>(t % static_cast<size_t>(count)) == mine) owned.push_back({t, v, views[v].region, 0});
        continue;
      }
      int64_t begin = 0;
      for (int before = 0; before < mine; ++before) begin += piece.region.part(before, count).size();
      owned.push_back({t, v, piece.region.part(mine, count), begin});
    }
  }
  return owned;
}

}  // namespace shardow::file
