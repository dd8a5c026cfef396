// Who holds what, known to every rank; and who writes it: every byte of every tensor exactly once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
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

  /// Tensors that are held alike have the same pieces, in one place: what follows from those alone is worked out once
  /// for all of them.
  class Pieces {
   public:
    Pieces() : Pieces(std::vector<Piece>()) {}
    explicit Pieces(std::vector<Piece> all);

    auto begin() const { return all_->begin(); }
    auto end() const { return all_->end(); }
    size_t size() const { return all_->size(); }
    const Piece& operator[](size_t p) const { return (*all_)[p]; }
    const void* id() const { return all_.get(); }  ///< equal for the same ones

    /// The pieces that a rank holds, ascending.
    std::vector<size_t> held_by(int rank) const;

   private:
    std::shared_ptr<const std::vector<Piece>> all_;
    std::shared_ptr<const std::vector<std::pair<int, size_t>>> by_rank_;
  };

  std::string name;
  DType dtype;
  Shape shape;
  Pieces pieces;
};

/// Throws kInvalidArgument where regions of a tensor overlap, or no rank holds some element.
void check_whole(const std::vector<Shared>& tensors);

/// Finds names in what share() gave; quickly where they come in its order.
class Finder {
 public:
  explicit Finder(const std::vector<Shared>& tensors) : tensors_(tensors) {}

  std::optional<size_t> find(std::string_view name);  ///< its index, or nothing

 private:
  const std::vector<Shared>& tensors_;
  size_t next_ = 0;
};

/// A part of a tensor that one rank writes: `region`, which begins at element `local_begin` of piece `piece`.
struct Owned {
  size_t piece;
  int rank;
  Region region;
  int64_t local_begin;
};

/// Who writes what of a tensor, every element once. Large pieces with several holders are divided among them; of small
/// ones, `turn` says which holder writes. `rank`: what that one writes, alone.
std::vector<Owned> owners(const Shared& tensor, size_t turn, std::optional<int> rank = {});

/// The pieces' regions, for coverage tests; never none.
std::vector<Region> regions_of(const Shared& tensor);

}  // namespace shardow::file
