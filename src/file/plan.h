// Who holds what, known to every rank; and who writes it: every byte of every tensor exactly once.
#pragma once

#include <cstdint>
#include <span>
#include <string>
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

/// Every tensor that some rank has, by name, from all ranks' views. Collective. Throws kInvalidArgument on every rank where ranks differ in
/// a tensor's dtype or shape, or one has a name twice.
std::vector<Shared> exchange(Group& group, std::span<const TensorView> views, Deadline deadline);

/// Throws kInvalidArgument where regions of a tensor overlap, or no rank holds some element.
void check_whole(const std::vector<Shared>& tensors);

/// The part of a view that this rank writes: `region`, whose elements begin at element `local_begin` of the view.
struct Owned {
  size_t tensor;  ///< index into what exchange() gave
  size_t view;
  Region region;
  int64_t local_begin;
};

/// What this rank writes. Large pieces with several holders are divided among them, small ones are dealt out.
std::vector<Owned> owned_by(int rank, const std::vector<Shared>& tensors, std::span<const TensorView> views);

}  // namespace shardow::file
