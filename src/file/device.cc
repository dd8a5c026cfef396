#include "file/device.h"

#include <atomic>

#include "file/feed.h"

namespace shardow::file {
namespace {

std::atomic<Devices*> replaced{nullptr};

}  // namespace

Devices& devices() noexcept {
  static Devices cuda;
  Devices* const replacement = replaced.load(std::memory_order_acquire);
  return replacement != nullptr ? *replacement : cuda;
}

Devices* replace_devices(Devices* replacement) noexcept {
  return replaced.exchange(replacement, std::memory_order_acq_rel);
}

Pinned::~Pinned() {
  try {
    if (copy_) copy_->wait();
  } catch (...) {  // the device has failed: nothing is copied any more
  }
  if (memory_ != nullptr) devices().unpin(memory_);
}

void Pinned::finish() {
  if (copy_) std::exchange(copy_, nullptr)->wait();
}

std::byte* Pinned::data() {
  finish();
  if (memory_ == nullptr) memory_ = static_cast<std::byte*>(devices().pin(static_cast<size_t>(kChunkBytes)));
  return memory_;
}

void Pinned::copy_from(const std::byte* device_memory, size_t bytes, const Device& device) {
  std::byte* const to = data();
  copy_ = devices().begin_copy(to, device_memory, bytes, device);
}

void Pinned::copy_to(std::byte* device_memory, size_t bytes, const Device& device) {
  const std::byte* const from = data();
  copy_ = devices().begin_copy(device_memory, from, bytes, device);
}

}  // namespace shardow::file
