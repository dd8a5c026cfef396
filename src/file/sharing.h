// How every rank learns who holds what, without reading what every other one has to say.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "file/ownership.h"

namespace shardow::file {

/// A rank's own tensors, for the others: a digest of names, dtypes, shapes and of which tensors lie alike, and one
/// region for all that do.
class Holding {
 public:
  explicit Holding(std::span<const TensorView> views);

  std::string words(int rank) const;                 ///< for sum_up()
  const std::string& list() const { return list_; }  ///< all of it but the regions

 private:
  std::string list_, regions_;
};

/// What one rank makes of everybody's words, by rank: who has the same list, and the regions of each of those; a new
/// name for all of it.
std::string sum_up(std::span<const std::string> by_rank);

/// Every tensor that some rank has, ascending by name. `said`: what sum_up() gave. Another round, only where ranks have
/// different lists, and one is long or neither rank 0's nor rank 1's. Throws kInvalidArgument on every rank where ranks
/// differ in a tensor's dtype or shape, or one has a name twice. Collective.
std::vector<Shared> shared_from(Group& group, const Holding& mine, const std::string& said,
                                std::chrono::milliseconds timeout);

}  // namespace shardow::file
