// Ring: pinned host memory through which weights on a device reach averages on the host, a slot at a time, and the link that fills it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/cuda.h"
#include "kernels/memory.h"

namespace shardow::average {

/// Slots begin at multiples of this, and what is copied into them does where it does not follow on what came before in the device's memory.
inline constexpr size_t kSlotAlignment = 64;

class Ring {
 public:
  static constexpr size_t kLeastBytes = 1024, kLeastSlots = 4;

  /// In about `bytes`, at least kLeastBytes. Throws kOutOfMemory where no more can be pinned.
  Ring(int index, size_t bytes);

  size_t bytes() const noexcept { return memory_.bytes(); }
  size_t slot_bytes() const noexcept { return slot_bytes_; }
  size_t num_slots() const noexcept { return num_slots_; }  ///< kLeastSlots or more; each has the link's mark of its number
  std::byte* slot(size_t i) const noexcept { return memory_.data() + i % num_slots_ * slot_bytes_; }
  kernels::cuda::Link& link() const noexcept { return *link_; }

 private:
  size_t slot_bytes_, num_slots_;
  kernels::Memory memory_;
  std::unique_ptr<kernels::cuda::Link> link_;  // ends before the memory
};

}  // namespace shardow::average
