#include "average/ring.h"

#include <algorithm>

namespace shardow::average {
namespace {

/// Of a slot: enough that a copy's latency does not show, and little enough that it is averaged out of the processor's
/// caches.
constexpr size_t kMostSlotBytes = size_t{8} << 20;

}  // namespace

Ring::Ring(int index, size_t bytes)
    : slot_bytes_(std::min(std::max(bytes, kLeastBytes) / kLeastSlots, kMostSlotBytes) / kSlotAlignment *
                  kSlotAlignment),
      num_slots_(std::max(bytes, kLeastBytes) / slot_bytes_),
      memory_(kernels::Memory::pinned(std::max(bytes, kLeastBytes), {Device::Kind::kCuda, index})),
      link_(kernels::cuda::make_link(index, num_slots_)) {}

}  // namespace shardow::average
