// What is saved and never in memory as a whole: tensors whose views have no memory (`data` is null).
#pragma once

#include <filesystem>
#include <functional>
#include <span>

#include "shardow/checkpoint.h"

namespace shardow::file {

/// Each rank's views say what it can produce, which may be all of every tensor: each element is asked for on one rank.
struct Producer {
  /// Fills `wanted`, a window of such a view's region, in its dtype and in host memory. Called by several threads at
  /// once.
  std::function<void(const TensorView& wanted)> read = {};
  /// Collective: when every element was asked for once, before anything is published. What it throws on one rank ends
  /// the save on all.
  std::function<void()> check = {};
  int threads = 4;  ///< that call read(): what network and solid-state disks ask for

  /// As save() of a file without a name, but for Group::begin().
  SaveReport save(Group& group, std::span<const TensorView> tensors, const std::filesystem::path& path,
                  const SaveOptions& options) const;
};

}  // namespace shardow::file
