#include "file/device.h"

#include <algorithm>
#include <vector>

#include "base/mutex.h"
#include "file/feed.h"

namespace shardow::file {
namespace {

/// Chunks of pinned memory that nobody uses, for whoever comes next: to make or free one can stop the device. Never
/// freed: when a process ends, the runtime may be gone before them.
class Spare {
 public:
  void* take(int index) {
    const base::Lock lock(mutex_);
    const auto found =
        std::find_if(chunks_.begin(), chunks_.end(), [&](const auto& chunk) { return chunk.first == index; });
    if (found == chunks_.end()) return nullptr;
    void* const memory = found->second;
    chunks_.erase(found);
    return memory;
  }

  /// False where enough are kept.
  bool keep(void* memory, int index) noexcept {
    const base::Lock lock(mutex_);
    if (chunks_.size() == kMost) return false;
    chunks_.emplace_back(index, memory);
    return true;
  }

  static Spare& instance() {
    static Spare* const spare = new Spare;
    return *spare;
  }

 private:
  static constexpr size_t kMost = 4;
  Spare() { chunks_.reserve(kMost); }

  base::Mutex mutex_;
  std::vector<std::pair<int, void*>> chunks_ SHARDOW_GUARDED_BY(mutex_);  // (device, memory)
};

}  // namespace

Pinned::~Pinned() {
  try {
    finish();
  } catch (...) {  // the device has failed: nothing is copied any more
  }
  if (memory_ != nullptr && !Spare::instance().keep(memory_, index_)) kernels::cuda::unpin(memory_, index_);
}

void Pinned::finish() {
  if (wait_) std::exchange(wait_, nullptr)();
}

std::byte* Pinned::data(const Device& device) {
  finish();
  if (memory_ == nullptr) {
    void* const kept = Spare::instance().take(device.index);
    memory_ = static_cast<std::byte*>(
        kept != nullptr ? kept : kernels::cuda::pin(static_cast<size_t>(kChunkBytes), device.index));
    index_ = device.index;
  }
  return memory_;
}

void Pinned::copy_from(const std::byte* device_memory, size_t bytes, const Device& device) {
  std::byte* const to = data(device);
  wait_ = kernels::cuda::begin_copy(to, device_memory, bytes, device);
}

void Pinned::copy_to(std::byte* device_memory, size_t bytes, const Device& device) {
  const std::byte* const from = data(device);
  wait_ = kernels::cuda::begin_copy(device_memory, from, bytes, device);
}

}  // namespace shardow::file
