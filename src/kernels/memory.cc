#include "kernels/memory.h"

#include <new>
#include <utility>

#include "kernels/cuda.h"

namespace shardow::kernels {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

Memory::Memory(size_t bytes, const Device& device) : bytes_(bytes), device_(device) {
  if (bytes == 0) return;
  const bool on_cuda = device.kind == Device::Kind::kCuda;
  data_ = static_cast<std::byte*>(on_cuda ? cuda::allocate(bytes, device.index) : ::operator new(bytes, kAlignment));
}

Memory Memory::pinned(size_t bytes, const Device& device) {
  Memory made;
  if (bytes > 0) made.data_ = static_cast<std::byte*>(cuda::allocate(bytes, device.index, true));
  made.bytes_ = bytes;
  made.device_ = device;
  made.pinned_ = true;
  return made;
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_),
      pinned_(other.pinned_) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  std::swap(pinned_, other.pinned_);
  return *this;
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  if (device_.kind == Device::Kind::kCuda) {
    cuda::release(data_, device_.index, pinned_);
  } else {
    ::operator delete(data_, kAlignment);
  }
}

}  // namespace shardow::kernels
