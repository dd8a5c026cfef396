// Ring: pinned host memory through which weights on a device reach averages on the host, a slot at a time, and the
// stream whose copies fill it. It goes on beside all else that the device does: it does not wait for the default
// stream, which would make copies wait for what they are to go on beside.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"
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
  size_t num_slots() const noexcept { return num_slots_; }  ///< kLeastSlots or more

  // Copies between the device and pinned memory, one after the other. The driver reports one that fails where it is
  // begun, or to the wait for a block behind it. One thread at a time copies and marks; another one may follow(),
  // join() and hold() meanwhile.
  /// Copies begun from here on come after what `stream` has to do by now.
  void follow(void* stream) {
    followed_.record(stream);
    followed_.hold(stream_.get());
  }
  /// Work that `stream` is given from here on comes after what `behind` has to do by now.
  void join(void* stream, void* behind) { followed_.order(stream, behind); }
  void copy(void* to, const void* from, size_t bytes) { kernels::cuda::copy(to, from, bytes, stream_.device()); }
  void drain() noexcept { stream_.drain(); }  ///< the host, until nothing is on its way, however that ended

  // Of what goes through in blocks: the slot of a block, and the mark behind its copies.
  std::byte* slot(size_t block) const noexcept { return memory_.data() + index(block) * slot_bytes_; }
  void mark(size_t block) { marks_[index(block)].record(stream_.get()); }  ///< after the copies begun so far
  void wait(size_t block) { marks_[index(block)].wait(); }                 ///< the host, for those before the last mark
  void hold(void* stream, size_t block) { marks_[index(block)].hold(stream); }  ///< `stream` waits, on the device

 private:
  size_t index(size_t block) const noexcept { return block % num_slots_; }

  size_t slot_bytes_, num_slots_;
  kernels::Memory memory_;
  kernels::cuda::Stream stream_;  // ends before the memory
  kernels::cuda::Event followed_;
  std::deque<kernels::cuda::Event> marks_;  // of the slots
};

inline Ring::Ring(int index, size_t bytes)
    : slot_bytes_(std::min(std::max(bytes, kLeastBytes) / kLeastSlots, kMostSlotBytes) / kSlotAlignment *
                  kSlotAlignment),
      num_slots_(std::max(bytes, kLeastBytes) / slot_bytes_),
      memory_(kernels::Memory::pinned(std::max(bytes, kLeastBytes), {Device::Kind::kCuda, index})),
      stream_(index),
      followed_(index) {
  for (size_t slot = 0; slot < num_slots_; ++slot) marks_.emplace_back(index);
}

}  // namespace shardow::average
