// How every rank learns who holds what, without reading what every other one has to say.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "file/kinds.h"
#include "file/ownership.h"
#include "group/collective_call.h"

namespace shardow::file {

/// A rank's own tensors, for the others: a digest of names, dtypes, shapes and of which tensors lie alike, and one
/// region for all that do. On one rank: who has the same list, and the regions of each of those. Throws
/// kInvalidArgument on every rank where ranks differ in a tensor's dtype or shape, or one has a name twice.
class SharedTensors final : public group::Comparison {
 public:
  SharedTensors(std::span<const TensorView> views, int rank);

  std::string words() override;
  std::string sum_up(const std::vector<std::string>& by_rank) const override;

  /// Takes another round only where ranks have different lists, and one is long or neither rank 0's nor rank 1's.
  void take(group::CollectiveCall& call, const std::string& total) override;

  std::vector<Shared> all;  ///< every tensor that some rank has, ascending by name, once they are taken

 private:
  std::vector<std::string> lists_of(group::CollectiveCall& call, const std::vector<Kind>& kinds) const;

  const int rank_;
  std::string list_, regions_;  // the list: all of it but the regions
};

}  // namespace shardow::file
