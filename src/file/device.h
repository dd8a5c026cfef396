// Device memory on its way to and from files: blocks of pinned host memory, and copies that go on while others are read
// or written.
#pragma once

#include <cstddef>
#include <optional>

#include "kernels/cuda_driver.h"
#include "kernels/memory.h"
#include "shardow/tensor_view.h"

namespace shardow::file {

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
  void copy(void* to, const void* from, size_t bytes, const Device& device);

  kernels::Memory memory_;
  std::optional<kernels::cuda::Event> copied_;  // empty: no copy is under way
};

}  // namespace shardow::file
