// Of the CUDA path what is no kernel: which devices answer, their memory, copies that go on. Built where a toolkit is
// found, as cuda.cu.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda.h"
#include "kernels/cuda_calls.h"
#include "shardow/error.h"

namespace shardow::kernels::cuda {
namespace {

void require_device() {
  if (!available()) throw Error(Code::kUnsupported, why_not());
}

/// Asked of the driver, since every question to the runtime would make the context.
bool has_context(int index) {
  using GetState = int (*)(int, unsigned*, int*);
  static const auto get_state = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    constexpr unsigned kSince = 7000;  // of CUDA, where the function came
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, kSince, cudaEnableDefault, &result);
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<GetState>(found) : nullptr;
  }();
  unsigned flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(index, &flags, &active) == 0 && active != 0;
}

/// Empty where a device answers.
std::string reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return {};
  static_cast<void>(cudaGetLastError());
  return std::string("no CUDA device answers: ") +
         (status == cudaSuccess ? "none is installed" : cudaGetErrorString(status));
}

const std::string& cached_reason() {
  static const std::string text = reason();
  return text;
}

class EventCopy final : public Copy {
 public:
  EventCopy(void* to, const void* from, size_t bytes, Device device)
      : index_(device.index), event_(std::make_unique<Event>()) {
    auto* const stream = static_cast<cudaStream_t>(device.stream);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copy between host and device");
    event_->record(stream);
  }
  ~EventCopy() override {
    const DeviceGuard guard(index_, std::nothrow);
    event_.reset();
  }
  void wait() override {
    const DeviceGuard guard(index_);
    event_->wait();
  }

 private:
  int index_;
  std::unique_ptr<Event> event_;
};

/// Its stream does not wait for the default one, which would make copies wait for what they are to go on beside.
class StreamLink final : public Link {
 public:
  StreamLink(int index, size_t num_marks) : index_(index), followed_(std::make_unique<Event>()) {
    for (size_t i = 0; i < num_marks; ++i) marks_.push_back(std::make_unique<Event>());
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~StreamLink() override {
    const DeviceGuard guard(index_, std::nothrow);
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaStreamDestroy(stream_));
    marks_.clear();
    followed_.reset();
  }
  void follow(void* stream) override { join(stream_, stream); }
  void join(void* stream, void* behind) override {
    const DeviceGuard guard(index_);
    followed_->record(static_cast<cudaStream_t>(behind));
    followed_->wait_on(static_cast<cudaStream_t>(stream));
  }
  void copy(void* to, const void* from, size_t bytes) override {
    const DeviceGuard guard(index_);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copy between host and device");
  }
  void mark(size_t which) override {
    const DeviceGuard guard(index_);
    marks_[which]->record(stream_);
  }
  void wait(size_t which) override {
    const DeviceGuard guard(index_);
    marks_[which]->wait();
  }
  void hold(void* stream, size_t which) override {
    const DeviceGuard guard(index_);
    marks_[which]->wait_on(static_cast<cudaStream_t>(stream));
  }
  void drain() noexcept override {
    const DeviceGuard guard(index_, std::nothrow);
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaGetLastError());
  }

 private:
  int index_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Event> followed_;
  std::vector<std::unique_ptr<Event>> marks_;
};

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // an error that is not sticky must not be reported twice
  const Code code = status == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kInternal;
  throw Error(code,
              std::string("CUDA: ") + what + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

DeviceGuard::DeviceGuard(int index) : index_(index) {
  require_device();
  check(cudaGetDevice(&previous_), "cudaGetDevice");
  check(cudaSetDevice(index), "cudaSetDevice");  // also where it is current already: a thread's first call makes it so
}

DeviceGuard::DeviceGuard(int index, std::nothrow_t) noexcept : index_(index) {
  static_cast<void>(cudaGetDevice(&previous_));
  static_cast<void>(cudaSetDevice(index));
}

DeviceGuard::~DeviceGuard() {
  if (previous_ != index_ && has_context(previous_)) static_cast<void>(cudaSetDevice(previous_));
}

bool built() noexcept {
  return true;
}
bool available() noexcept {
  return cached_reason().empty();
}
const char* why_not() noexcept {
  return cached_reason().c_str();
}

bool capturing(const Device& device) {
  if (device.kind != Device::Kind::kCuda || device.stream == nullptr)
    return false;  // the default stream can't be captured
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(device.stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void* allocate(size_t bytes, int index) {
  const DeviceGuard guard(index);
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  return memory;
}

void release(void* memory, int index) noexcept {
  const DeviceGuard guard(index, std::nothrow);
  static_cast<void>(cudaFree(memory));
}

void* pin(size_t bytes, int index) {
  const DeviceGuard guard(index);
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc");
  return memory;
}

void unpin(void* memory, int index) noexcept {
  const DeviceGuard guard(index, std::nothrow);
  static_cast<void>(cudaFreeHost(memory));
}

std::unique_ptr<Copy> begin_copy(void* to, const void* from, size_t bytes, Device device) {
  const DeviceGuard guard(device.index);
  return std::make_unique<EventCopy>(to, from, bytes, device);
}

std::unique_ptr<Link> make_link(int index, size_t num_marks) {
  const DeviceGuard guard(index);
  return std::make_unique<StreamLink>(index, num_marks);
}

}  // namespace shardow::kernels::cuda
