#include "file/device.h"

#include <algorithm>
#include <vector>

#include "base/mutex.h"
#include "file/feed.h"
#include "kernels/cuda.h"

namespace shardow::file {
namespace {

/// Chunks of pinned memory that nobody uses, for whoever comes next: to make or free one can stop the device. Never
/// freed: when a process ends, the runtime may be gone before them.
struct Spare {
  static constexpr size_t kMost = 4;
  Spare() { chunks.reserve(kMost); }

  base::Mutex mutex;
  std::vector<kernels::Memory> chunks SHARDOW_GUARDED_BY(mutex);
};

Spare& spare() {
  static Spare* const spare = new Spare;
  return *spare;
}

/// Returns an empty one where none is kept for the device.
kernels::Memory take_chunk(const Device& device) {
  Spare& all = spare();
  const base::Lock lock(all.mutex);
  const auto found = std::find_if(all.chunks.begin(), all.chunks.end(),
                                  [&](const auto& chunk) { return chunk.device().index == device.index; });
  if (found == all.chunks.end()) return {};
  kernels::Memory taken = std::move(*found);
  all.chunks.erase(found);
  return taken;
}

/// Frees it where enough are kept.
void keep_chunk(kernels::Memory chunk) noexcept {
  Spare& all = spare();
  const base::Lock lock(all.mutex);
  if (all.chunks.size() < Spare::kMost) all.chunks.push_back(std::move(chunk));
}

}  // namespace

Pinned::~Pinned() {
  try {
    finish();
  } catch (...) {  // the device has failed: nothing is copied any more
  }
  if (memory_.data() != nullptr) keep_chunk(std::move(memory_));
}

void Pinned::finish() {
  if (copied_) copied_->wait();
  copied_.reset();
}

std::byte* Pinned::data(const Device& device) {
  finish();
  if (memory_.data() == nullptr) memory_ = take_chunk(device);
  if (memory_.data() == nullptr) memory_ = kernels::Memory::pinned(static_cast<size_t>(kChunkBytes), device);
  return memory_.data();
}

void Pinned::copy_from(const std::byte* device_memory, size_t bytes, const Device& device) {
  copy(data(device), device_memory, bytes, device);
}

void Pinned::copy_to(std::byte* device_memory, size_t bytes, const Device& device) {
  copy(device_memory, data(device), bytes, device);
}

void Pinned::copy(void* to, const void* from, size_t bytes, const Device& device) {
  copied_.emplace(device.index);
  kernels::cuda::copy(to, from, bytes, device);
  copied_->record(device.stream);
}

}  // namespace shardow::file
