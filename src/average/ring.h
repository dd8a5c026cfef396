// Ring: pinned host memory through which weights on a device reach averages on the host, a slot at a time, and the
// stream whose copies fill it. The copies run beside all other work of the device: the stream does not wait for the
// default stream, which would make copies wait for that work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"
#include "kernels/memory.h"

namespace shardow::average {

/// Slots begin at multiples of this, and so does each copy in a slot, unless it continues the one before it in the
/// device's memory.
inline constexpr size_t kSlotAlignment = 64;

/// Limits a slot: so large that a copy's latency does not show, and so small that its weights are averaged from the
/// processor's caches.
inline constexpr size_t kMostSlotBytes = size_t{8} << 20;

class Ring {
 public:
  static constexpr size_t kLeastBytes = 1024, kLeastSlots = 4;

  /// Makes a ring of about `bytes`, at least kLeastBytes. Throws kOutOfMemory where no more can be pinned.
  Ring(int index, size_t bytes);

  size_t bytes() const noexcept { return memory_.bytes(); }
  size_t slot_bytes() const noexcept { return slot_bytes_; }
  size_t num_slots() const noexcept { return num_slots_; }  ///< kLeastSlots or more

  // Copies between the device and pinned memory, one after the other. The driver reports a failed copy where it begins,
  // or to the wait for a block behind it. One thread at a time copies and marks; another one may follow(), join() and
  // hold() meanwhile.
  /// Makes later copies wait for the work that `stream` has got so far.
  void follow(void* stream) {
    followed_.record(stream);
    followed_.hold(stream_.get());
  }
  /// Makes later work of `stream` wait for the work that `behind` has got so far.
  void join(void* stream, void* behind) { followed_.order(stream, behind); }
  void copy(void* to, const void* from, size_t bytes) { kernels::cuda::copy(to, from, bytes, stream_.device()); }
  void drain() noexcept { stream_.drain(); }  ///< waits, on the host, until all copies have ended, well or not

  // Blocks pass through the ring: these are the slot of a block, and the mark behind its copies.
  std::byte* slot(size_t block) const noexcept { return memory_.data() + index(block) * slot_bytes_; }
  void mark(size_t block) { marks_[index(block)].record(stream_.get()); }  ///< after the copies begun so far
  void wait(size_t block) { marks_[index(block)].wait(); }  ///< on the host, for the copies before the last mark
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
