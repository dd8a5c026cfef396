// Ring: pinned host memory through which weights on a device reach averages on the host, a slot at a time, and the link
// that fills it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/cuda.h"
#include "kernels/memory.h"

namespace shardow::average {

/// Slots begin at multiples of this, and what is copied into them does where it does not follow on what came before in
/// the device's memory.
inline constexpr size_t kSlotAlignment = 64;

/// Of a slot: enough that a copy's latency does not show, and little enough that it is averaged out of the processor's
/// caches.
inline constexpr size_t kMostSlotBytes = size_t{8} << 20;

class Ring {
 public:
  static constexpr size_t kLeastBytes = 1024, kLeastSlots = 4;

  /// In about `bytes`, at least kLeastBytes. Throws kOutOfMemory where no more can be pinned.
  Ring(int index, size_t bytes);

  size_t bytes() const noexcept { return memory_.bytes(); }
  size_t slot_bytes() const noexcept { return slot_bytes_; }
  size_t num_slots() const noexcept {
    return num_slots_;
  }  ///< kLeastSlots or more; each has the link's mark of its number
  kernels::cuda::Link& link() const noexcept { return *link_; }

  // Of what goes through in blocks: the slot of a block, and the mark behind its copies.
  std::byte* slot(size_t block) const noexcept { return memory_.data() + index(block) * slot_bytes_; }
  void mark(size_t block) const { link_->mark(index(block)); }
  void wait(size_t block) const { link_->wait(index(block)); }
  void hold(void* stream, size_t block) const { link_->hold(stream, index(block)); }

 private:
  size_t index(size_t block) const noexcept { return block % num_slots_; }

  size_t slot_bytes_, num_slots_;
  kernels::Memory memory_;
  std::unique_ptr<kernels::cuda::Link> link_;  // ends before the memory
};

inline Ring::Ring(int index, size_t bytes)
    : slot_bytes_(std::min(std::max(bytes, kLeastBytes) / kLeastSlots, kMostSlotBytes) / kSlotAlignment *
                  kSlotAlignment),
      num_slots_(std::max(bytes, kLeastBytes) / slot_bytes_),
      memory_(kernels::Memory::pinned(std::max(bytes, kLeastBytes), {Device::Kind::kCuda, index})),
      link_(kernels::cuda::make_link(index, num_slots_)) {}

}  // namespace shardow::average
