// Device memory on its way to and from files: blocks of pinned host memory, and copies that go on while others are read or written.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "base/seam.h"
#include "kernels/cuda.h"
#include "shardow/tensor_view.h"

namespace shardow::file {

/// What devices are asked for (base/seam.h); tests pass in memory of their own.
class Devices {
 public:
  virtual ~Devices() = default;
  /// Memory of a chunk for copies from and to the device. A few are kept for whoever comes next: to make or free one can stop the device.
  virtual void* pin(size_t bytes, int index);
  virtual void unpin(void* memory, int index) noexcept;
  virtual std::unique_ptr<kernels::cuda::Copy> begin_copy(void* to, const void* from, size_t bytes, Device device) {
    return kernels::cuda::begin_copy(to, from, bytes, device);
  }
};

inline Devices& devices() noexcept {  ///< those of this thread's work
  return base::Seam<Devices>::here();
}

inline bool on_device(const Device& device) noexcept {
  return device.kind != Device::Kind::kCpu;
}

/// A chunk of pinned memory and the copy that it is in. Made when it is first used.
class Pinned {
 public:
  Pinned() = default;
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  std::byte* data(const Device& device);  ///< the chunk, when the copy before has ended
  void finish();                          ///< waits for the copy
  void copy_from(const std::byte* device_memory, size_t bytes, const Device& device);
  void copy_to(std::byte* device_memory, size_t bytes, const Device& device);

 private:
  Devices* devices_ = nullptr;  // that the memory is from
  std::byte* memory_ = nullptr;
  int index_ = 0;  // of the device that it was made for
  std::unique_ptr<kernels::cuda::Copy> copy_;
};

}  // namespace shardow::file
