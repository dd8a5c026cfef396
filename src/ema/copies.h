// Ranks that hold the same elements of averages must hold the same values, since a file takes one rank's for all.
#pragma once

#include <span>
#include <string>

#include "shardow/checkpoint.h"
#include "shardow/group.h"

namespace shardow::ema {

/// What this rank holds in host memory, as check_copies() compares it: one pass over it. Local.
class Copies {
 public:
  explicit Copies(std::span<const SaveFile> files);

  /// Sixteen bytes each of what is held whole and of the rest.
  std::string summary() const;
  /// Every tensor: a key of its name and region, and the checksum.
  const std::string& all() const { return all_; }

 private:
  std::string whole_, rest_, all_;
};

/// Throws kInvalidArgument on every rank where two that hold the same whole tensors, or the same parts, differ in their
/// values; names the first tensor. Collective: one small message, and the rest only where something differs.
void check_copies(Group& group, const Copies& mine, Deadline deadline);

}  // namespace shardow::ema
