// What many tensors are, looked at once.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "torch_memory.h"

namespace shardow::python {

/// Tensors as they were when they were looked at: where each lies, and what it is. Holds none of them.
class Looked {
 public:
  Looked(const TorchMemory& memory, const nanobind::list& tensors);

  size_t size() const noexcept { return rows_.size(); }
  uint64_t mark(size_t i) const { return rows_[i].mark; }

  /// `tensors` are where and what these were; false where any is not plain.
  bool still(const nanobind::list& tensors) const;

  /// One byte for each: not 0 where it is torch's own kind of tensor, dense, its elements in order in memory of the
  /// host (1) or of a CUDA device (2).
  nanobind::bytes plain() const;

  /// All are plain, and no two have bytes in common. Empty ones lie nowhere.
  bool apart() const;

  /// All are plain and in the host's memory, none of them twice, and no two have bytes in common. False too where two
  /// are empty, which lie nowhere and may be one.
  bool alone() const;

  // Of plain ones; None for others.
  nanobind::list addresses() const;
  nanobind::list dtypes() const;   ///< torch's
  nanobind::list regions() const;  ///< all of each tensor, one object for each shape

 private:
  struct Row {
    uintptr_t address;
    uint64_t bytes, mark;
    uint32_t dtype, shape;  // in dtypes_, regions_
    int32_t index;          // of the device
    char plain;
  };

  nanobind::list column(nanobind::object (*of)(const Looked&, const Row&)) const;

  TorchMemory memory_;
  std::vector<Row> rows_;
  nanobind::list dtypes_, regions_;
};

}  // namespace shardow::python
