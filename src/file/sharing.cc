// Ranks mostly hold the same tensors, and many tensors lie alike: those of one shape that are cut the same way. So:
//
//   1. a rank lists its tensors: name, dtype, shape, and a number for the region; equal regions have one number (a
//   class). It tells a digest of the list, and the region of each class; ranks 0 and 1 a short list too, since of a
//   sharded model rank 0 has more than others, who have the same
//   2. one rank puts those together that have the same digest (a kind of ranks; kinds.h), and tells all: the kinds, and
//   for each class the regions of the kind's ranks
//   3. where there is one kind, its list is everybody's own. Else those that were told are known; where one was not,
//   the first rank of each kind tells its list
//
// Pieces are made once for a class and shared by all its tensors.
//
// Each round has the whole timeout. A rank that does not come ends the round that it is missing in, and with it the
// call: so silence costs the others one timeout, and a rank that is late every time, but never by as much, costs nobody
// the call.
#include "file/sharing.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "group/ranks.h"
#include "group/wire.h"
#include "tensor/dtype.h"
#include "tensor/runs.h"

namespace shardow::file {
namespace {

using base::fail;
using group::Receiver;
using group::Sender;

/// Puts pieces together, rank by rank.
class PieceMaker {
 public:
  void add(const std::string& encoded_region, int rank, const std::string& name) {
    const auto [found, is_new] = known_.try_emplace(encoded_region, pieces_.size());
    if (is_new) found->second = index_of(Region::decode(encoded_region));
    auto& holders = pieces_[found->second].holders;
    if (!std::binary_search(holders.begin(), holders.end(), rank)) {
      holders.insert(std::upper_bound(holders.begin(), holders.end(), rank), rank);
    } else if (pieces_[found->second].region.size() > 0) {
      fail(Code::kInvalidArgument, "'{}' is there twice on rank {}", name, rank);
    }
  }

  Shared::Pieces take() {
    std::erase_if(pieces_, [](const Shared::Piece& piece) { return piece.region.size() == 0; });
    return Shared::Pieces(std::move(pieces_));
  }

 private:
  /// Of the piece that has these elements, however it was described.
  size_t index_of(const Region& region) {
    const std::optional<Run> first = RunCursor(region).next();
    std::vector<size_t>& like_it = by_begin_[{first ? first->global_begin : 0, region.size()}];
    const auto same =
        std::find_if(like_it.begin(), like_it.end(), [&](size_t p) { return pieces_[p].region == region; });
    if (same != like_it.end()) return *same;
    like_it.push_back(pieces_.size());
    pieces_.push_back({region, {}});
    return like_it.back();
  }

  std::vector<Shared::Piece> pieces_;
  std::unordered_map<std::string, size_t> known_;
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> by_begin_;
};

/// The pieces of tensors by where they lie: (kind, class), mostly one of them.
class PieceStore {
 public:
  explicit PieceStore(const std::vector<Kind>& kinds) : kinds_(kinds) {}

  using Where = std::vector<std::pair<size_t, size_t>>;

  const Shared::Pieces& of(const Where& where, const std::string& name) {
    if (last_ != made_.end() && last_->first == where) return last_->second;  // as most often
    const auto [found, is_new] = made_.try_emplace(where);
    last_ = found;
    if (!is_new) return found->second;
    PieceMaker maker;
    for (const auto& [k, c] : where) {
      const Kind& kind = kinds_[k];
      for (size_t i = 0; i < kind.ranks.size(); ++i)
        maker.add(kind.regions.at(c)[i], static_cast<int>(kind.ranks[i]), name);
    }
    return found->second = maker.take();
  }

 private:
  const std::vector<Kind>& kinds_;
  std::map<Where, Shared::Pieces> made_;
  std::map<Where, Shared::Pieces>::const_iterator last_ = made_.end();
};

/// A tensor as one list has it: its class of regions there.
struct Listed {
  std::string name;
  DType dtype;
  Shape shape;
  size_t kind, held_as;
};

void add(std::vector<Listed>& all, const std::string& list, size_t kind) {
  for (Receiver in(list); !in.done();) {
    std::string name = in.text();
    const auto dtype = static_cast<DType>(in.number());
    Shape shape(static_cast<size_t>(in.number()));
    for (int64_t& size : shape) size = in.number();
    all.push_back({std::move(name), dtype, std::move(shape), kind, static_cast<size_t>(in.number())});
  }
}

/// `first`: of the same name.
void check_same(const Listed& first, const Listed& one, int64_t rank) {
  if (one.dtype != first.dtype) {
    fail(Code::kInvalidArgument, "'{}' is {} on rank {} and {} before it; every rank must hold the same tensors",
         one.name, dtype_name(one.dtype), rank, dtype_name(first.dtype));
  }
  if (one.shape != first.shape) {
    fail(Code::kInvalidArgument,
         "'{}' has shape [{}] on rank {} and [{}] before it; every rank must hold the same tensors", one.name,
         fmt::join(one.shape, ", "), rank, fmt::join(first.shape, ", "));
  }
}

}  // namespace

SharedTensors::SharedTensors(std::span<const TensorView> views, int rank) : rank_(rank) {
  std::unordered_map<std::string, int64_t> classes;
  Sender list, regions;
  std::vector<const TensorView*> ordered;
  for (const TensorView& view : views) ordered.push_back(&view);
  std::stable_sort(ordered.begin(), ordered.end(),
                   [](const TensorView* a, const TensorView* b) { return a->name < b->name; });
  const Region* last = nullptr;
  int64_t class_of_last = 0;
  for (const TensorView* const one : ordered) {  // (1)
    const TensorView& view = *one;
    if (last == nullptr || !(*last == view.region)) {
      const std::string region = view.region.encode();
      const auto [found, is_new] = classes.try_emplace(region, static_cast<int64_t>(classes.size()));
      if (is_new) regions.text(region);
      last = &view.region;
      class_of_last = found->second;
    }
    list.text(view.name);
    list.number(static_cast<int64_t>(view.dtype));
    list.number(static_cast<int64_t>(view.region.shape().size()));
    for (const int64_t size : view.region.shape()) list.number(size);
    list.number(class_of_last);
  }
  list_ = list.bytes();
  regions_ = regions.bytes();
}

std::string SharedTensors::words() {
  constexpr size_t kShort = 2048;
  const std::string list = rank_ <= 1 ? packed(list_) : std::string();
  Sender out;
  out.number(static_cast<int64_t>(group::digest(list_)));
  out.text(list.size() <= kShort ? list : std::string());
  out.text(packed(regions_));
  return out.bytes();
}

std::string SharedTensors::sum_up(const std::vector<std::string>& by_rank) const {
  std::vector<Kind> kinds;  // (2)
  std::map<int64_t, size_t> known;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].empty()) return "";  // it saves other files, and another comparison says so
    Receiver told(by_rank[rank]);
    const auto [found, is_new] = known.try_emplace(told.number(), kinds.size());
    if (is_new) kinds.emplace_back();
    Kind& kind = kinds[found->second];
    kind.ranks.push_back(static_cast<int64_t>(rank));
    if (std::string list = told.text(); !list.empty()) kind.list = std::move(list);
    const std::string regions = unpacked(told.text());
    size_t of_class = 0;
    for (Receiver in(regions); !in.done(); ++of_class) {
      if (of_class == kind.regions.size()) kind.regions.emplace_back();
      kind.regions[of_class].push_back(in.text());
    }
  }
  return pack(kinds);
}

/// (3): the lists by kind.
std::vector<std::string> SharedTensors::lists_of(group::CollectiveCall& call, const std::vector<Kind>& kinds) const {
  if (kinds.size() == 1) return {list_};
  std::vector<std::string> lists;
  for (const Kind& kind : kinds) {
    if (!kind.list.empty()) lists.push_back(unpacked(kind.list));
  }
  if (lists.size() == kinds.size()) return lists;
  lists.clear();
  const bool tells = std::any_of(kinds.begin(), kinds.end(), [&](const Kind& kind) { return kind.ranks[0] == rank_; });
  const auto join = [&](const std::vector<std::string>& by_rank) {
    Sender out;
    for (const Kind& kind : kinds) out.text(by_rank.at(static_cast<size_t>(kind.ranks[0])));
    return group::Ranks::Decision{packed(out.bytes())};
  };
  const std::string packed_lists =
      group::ranks_of(call.group()).decide(tells ? "+" + list_ : std::string(), join, call.deadline()).common;
  const std::string joined = unpacked(packed_lists);
  for (Receiver in(joined); !in.done();) lists.push_back(in.text().substr(1));
  return lists;
}

void SharedTensors::take(group::CollectiveCall& call, const std::string& total) {
  const std::vector<Kind> kinds = unpack(total);
  const std::vector<std::string> lists = lists_of(call, kinds);
  std::vector<Listed> listed;
  for (size_t k = 0; k < kinds.size(); ++k) add(listed, lists[k], k);
  const auto before = [](const Listed& a, const Listed& b) { return a.name < b.name; };
  if (!std::is_sorted(listed.begin(), listed.end(), before))
    std::stable_sort(listed.begin(), listed.end(), before);  // one list is in order
  PieceStore pieces(kinds);
  PieceStore::Where where;
  all.reserve(listed.size());
  for (size_t first = 0, end = 0; first < listed.size(); first = end) {
    where.clear();
    for (; end < listed.size() && listed[end].name == listed[first].name; ++end) {
      check_same(listed[first], listed[end], kinds[listed[end].kind].ranks[0]);
      where.emplace_back(listed[end].kind, listed[end].held_as);
    }
    auto& [name, dtype, shape, kind, held_as] = listed[first];
    const Shared::Pieces& held = pieces.of(where, name);
    all.push_back({std::move(name), dtype, std::move(shape), held});
  }
}

}  // namespace shardow::file
