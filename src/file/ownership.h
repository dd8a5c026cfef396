// Who holds what, known to every rank; and who writes it: every byte of every tensor exactly once.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/group.h"
#include "shardow/tensor_view.h"

namespace shardow::file {

/// One tensor over all ranks: its distinct regions, and which ranks hold each. Regions without elements are left out.
struct Shared {
  struct Piece {
    Region region;
    std::vector<int> holders;  ///< ascending
  };
  std::string name;
  DType dtype;
  Shape shape;
  std::vector<Piece> pieces;
};

/// Every tensor that some rank has, ascending by name, from all ranks' views. Collective. Throws kInvalidArgument on every rank where ranks
/// differ in a tensor's dtype or shape, or one has a name twice.
std::vector<Shared> share(Group& group, std::span<const TensorView> views, Deadline deadline);

/// The two halves of share(), for calls that exchange more than views: what a rank tells of its own, and what comes of everybody's, by
/// rank.
std::string describe(std::span<const TensorView> views);
std::vector<Shared> shared_from(std::span<const std::string> described);

/// Throws kInvalidArgument where regions of a tensor overlap, or no rank holds some element.
void check_whole(const std::vector<Shared>& tensors);

/// The index of `name` in what share() gave, or nothing.
std::optional<size_t> find(const std::vector<Shared>& tensors, std::string_view name);

/// A part of a tensor that one rank writes: `region`, which begins at element `local_begin` of piece `piece`.
struct Owned {
  size_t piece;
  int rank;
  Region region;
  int64_t local_begin;
};

/// Who writes what of a tensor, every element once. Large pieces with several holders are divided among them; of small ones, `turn` says
/// which holder writes.
std::vector<Owned> owners(const Shared& tensor, size_t turn);

/// The pieces' regions, for coverage tests; never none.
std::vector<Region> regions_of(const Shared& tensor);

}  // namespace shardow::file
