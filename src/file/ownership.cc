#include "file/ownership.h"

#include <algorithm>
#include <map>

#include "base/errors.h"
#include "comm/wire.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using base::fail;
using comm::Receiver;
using comm::Sender;

constexpr int64_t kDivideBytes = int64_t{1} << 20;  // pieces below are written by one holder

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

std::string describe(std::span<const TensorView> views) {
  Sender out;
  for (const TensorView& view : views) {
    out.text(view.name);
    out.number(static_cast<int64_t>(view.dtype));
    out.text(view.region.encode());
  }
  return out.bytes();
}

std::vector<Shared> shared_from(std::span<const std::string> described) {
  std::map<std::string, Shared> all;
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

std::vector<Shared> share(Group& group, std::span<const TensorView> views, Deadline deadline) {
  return shared_from(group.all_gather(describe(views), deadline));
}

void check_whole(const std::vector<Shared>& tensors) {
  for (const Shared& tensor : tensors) {
    const std::vector<Region> regions = regions_of(tensor);
    int64_t where = 0;
    if (!covers(regions, &where))
      fail(Code::kInvalidArgument, "'{}': no rank holds element {}", tensor.name, where_text(tensor.shape, where));
    if (!covers_once(regions, &where)) {
      fail(Code::kInvalidArgument, "'{}': element {} belongs to two different pieces; ranks must hold equal or disjoint ones", tensor.name,
           where_text(tensor.shape, where));
    }
  }
}

std::optional<size_t> find(const std::vector<Shared>& tensors, std::string_view name) {
  const auto found = std::lower_bound(tensors.begin(), tensors.end(), name, [](const Shared& a, std::string_view b) { return a.name < b; });
  if (found == tensors.end() || found->name != name) return std::nullopt;
  return static_cast<size_t>(found - tensors.begin());
}

std::vector<Owned> owners(const Shared& tensor, size_t turn) {
  std::vector<Owned> all;
  for (size_t p = 0; p < tensor.pieces.size(); ++p) {
    const auto& [region, holders] = tensor.pieces[p];
    const auto count = static_cast<int>(holders.size());
    if (count == 1 || region.size() * dtype_bits(tensor.dtype) / 8 < kDivideBytes) {
      all.push_back({p, holders[turn % holders.size()], region, 0});
      continue;
    }
    int64_t begin = 0;
    for (int i = 0; i < count; ++i) {
      all.push_back({p, holders[static_cast<size_t>(i)], region.part(i, count), begin});
      begin += all.back().region.size();
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
