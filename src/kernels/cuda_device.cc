// The CUDA path but for kernels: memory of devices, copies that go on.
#include <functional>
#include <memory>
#include <vector>

#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"

namespace shardow::kernels::cuda {
namespace {

/// Its stream does not wait for the default one, which would make copies wait for what they are to go on beside.
class StreamLink final : public Link {
 public:
  StreamLink(int index, size_t num_marks) : index_(index), resources_(std::make_unique<Resources>(num_marks)) {}
  ~StreamLink() override {
    const DeviceGuard guard(index_, std::nothrow);
    resources_.reset();
  }
  void follow(void* behind) override {
    const DeviceGuard guard(index_);
    resources_->followed.record(behind);
    resources_->followed.wait_on(stream());
  }
  void join(void* stream, void* behind) override {
    const DeviceGuard guard(index_);
    resources_->followed.order(stream, behind);
  }
  void copy(void* to, const void* from, size_t bytes) override {
    const DeviceGuard guard(index_);
    driver().copy(to, from, bytes, stream());
  }
  void mark(size_t which) override {
    const DeviceGuard guard(index_);
    resources_->marks[which].record(stream());
  }
  void wait(size_t which) override {
    const DeviceGuard guard(index_);
    resources_->marks[which].wait();
  }
  void hold(void* stream, size_t which) override {
    const DeviceGuard guard(index_);
    resources_->marks[which].wait_on(stream);
  }
  void drain() noexcept override {
    const DeviceGuard guard(index_, std::nothrow);
    static_cast<void>(driver().synchronize.status(stream()));
  }

 private:
  struct Resources {
    explicit Resources(size_t num_marks) : marks(num_marks) {}
    Stream stream;
    Event followed;
    std::vector<Event> marks;
  };

  void* stream() const { return resources_->stream.get(); }

  int index_;
  std::unique_ptr<Resources> resources_;
};

}  // namespace

bool capturing(const Device& device) {
  if (device.kind != Device::Kind::kCuda) return false;
  const DeviceGuard guard(device.index);
  return state_of(device.stream) == StreamState::kCaptured;
}

void* allocate(size_t bytes, int index) {
  const DeviceGuard guard(index);
  void* memory = nullptr;
  driver().allocate(&memory, bytes);
  return memory;
}

void release(void* memory, int index) noexcept {
  const DeviceGuard guard(index, std::nothrow);
  static_cast<void>(driver().free.status(memory));
}

size_t rest_of_allocation(const void* memory, int index) noexcept {
  const DeviceGuard guard(index, std::nothrow);
  void* begin = nullptr;
  size_t bytes = 0;
  if (driver().address_range.status(&begin, &bytes, const_cast<void*>(memory)) != 0) return 0;
  return bytes - static_cast<size_t>(static_cast<const std::byte*>(memory) - static_cast<std::byte*>(begin));
}

void* pin(size_t bytes, int index) {
  const DeviceGuard guard(index);
  void* memory = nullptr;
  driver().allocate_pinned(&memory, bytes, kPortable);
  return memory;
}

void unpin(void* memory, int index) noexcept {
  const DeviceGuard guard(index, std::nothrow);
  static_cast<void>(driver().free_pinned.status(memory));
}

void finish(const Device& device) {
  const DeviceGuard guard(device.index);
  driver().synchronize(device.stream);
}

std::function<void()> begin_copy(void* to, const void* from, size_t bytes, Device device) {
  const DeviceGuard guard(device.index);
  const std::shared_ptr<Event> event(new Event, [index = device.index](const Event* ended) {
    const DeviceGuard with_context(index, std::nothrow);
    delete ended;
  });
  driver().copy(to, from, bytes, device.stream);
  event->record(device.stream);
  return [event, index = device.index] {
    const DeviceGuard with_context(index);
    event->wait();
  };
}

std::unique_ptr<Link> make_link(int index, size_t num_marks) {
  const DeviceGuard guard(index);
  return std::make_unique<StreamLink>(index, num_marks);
}

}  // namespace shardow::kernels::cuda
