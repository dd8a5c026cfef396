// The CUDA path but for kernels: memory of devices, copies, streams and their events.
#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"

namespace shardow::kernels::cuda {

void* allocate(size_t bytes, int index, bool pinned) {
  const DeviceGuard guard(index);
  void* memory = nullptr;
  pinned ? guard->allocate_pinned(&memory, bytes, kPortable) : guard->allocate(&memory, bytes);
  return memory;
}

void release(void* memory, int index, bool pinned) noexcept {
  const DeviceGuard guard(index, std::nothrow);
  static_cast<void>(pinned ? guard->free_pinned.status(memory) : guard->free.status(memory));
}

size_t rest_of_allocation(const void* memory, int index) noexcept {
  const DeviceGuard guard(index, std::nothrow);
  void* begin = nullptr;
  size_t bytes = 0;
  if (guard->address_range.status(&begin, &bytes, const_cast<void*>(memory)) != 0) return 0;
  return bytes - static_cast<size_t>(static_cast<const std::byte*>(memory) - static_cast<std::byte*>(begin));
}

void copy(void* to, const void* from, size_t bytes, const Device& device) {
  DeviceGuard(device.index)->copy(to, from, bytes, device.stream);
}

void finish(const Device& device) {
  DeviceGuard(device.index)->synchronize(device.stream);
}

/// The default stream can't be captured.
StreamState state_of(const Device& device) {
  const DeviceGuard guard(device.index);
  int captured = 0;
  if (device.stream != nullptr && guard->is_capturing.status(device.stream, &captured) != 0) return StreamState::kGone;
  return captured != 0 ? StreamState::kCaptured : StreamState::kReady;
}

bool capturing(const Device& device) {
  return state_of(device) == StreamState::kCaptured;
}

void Event::order(void* stream, void* behind) {
  const StreamState last = state_of({Device::Kind::kCuda, index_, behind});
  if (last == StreamState::kCaptured || capturing({Device::Kind::kCuda, index_, stream})) return;
  if (last == StreamState::kGone) return DeviceGuard(index_)->synchronize_context();
  record(behind);
  hold(stream);
}

}  // namespace shardow::kernels::cuda
