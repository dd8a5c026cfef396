// What is saved and never in memory as a whole: tensors whose views have no memory (`data` is null).
#pragma once

#include <functional>
#include <vector>

#include "group/counts.h"
#include "shardow/tensor_view.h"

namespace shardow::file {

/// Each rank's views say what it can produce, which may be all of every tensor: each element is asked for on one rank.
struct Producer {
  /// Fills `wanted`, a window of such a view's region, in its dtype and in host memory. Called by several threads at
  /// once.
  std::function<void(const TensorView& wanted)> read = {};
  std::vector<group::Counts> counts = {};  ///< of what was read when every element was asked for once
  /// On rank 0, which has all ranks' counts then, before anything is published. What it throws ends the save.
  std::function<void()> check = {};
  int threads = 4;  ///< that call read(): what network and solid-state disks ask for
};

}  // namespace shardow::file
