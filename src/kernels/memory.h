// The one owner of memory that a device works on.
#pragma once

#include <cstddef>

#include "shardow/tensor_view.h"

namespace shardow::kernels {

/// Memory of a device, the CPU included, or of the host pinned for one; uninitialised, released with the object. Throws
/// kOutOfMemory or kUnsupported where a device has none to give.
class Memory {
 public:
  Memory() = default;
  Memory(size_t bytes, const Device& device);  ///< aligned to 64 bytes or more
  static Memory pinned(size_t bytes,
                       const Device& device);  ///< host memory that the device copies from and to by itself
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  std::byte* data() const noexcept { return data_; }  ///< null if and only if empty
  size_t bytes() const noexcept { return bytes_; }
  const Device& device() const noexcept { return device_; }
  void abandon() noexcept { data_ = nullptr; }  ///< leaves it to what a device may still read it for: never released

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  Device device_;
  bool pinned_ = false;
};

}  // namespace shardow::kernels
