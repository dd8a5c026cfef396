// What the files of the CUDA path share: checked calls of the runtime, the current device, events.
//
// A process that uses one device of eight must not get contexts on the others, half a gigabyte each. Making a device
// current makes its context, so the guard makes the previous one current again only where that one has a context
// already (torch does the same).
#pragma once

#include <cuda_runtime.h>

#include <new>

namespace shardow::kernels::cuda {

/// Throws kOutOfMemory or kInternal with the runtime's message, unless `status` is success.
void check(cudaError_t status, const char* what);

/// Makes a device current, and the previous one on the way out if that has a context.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  /// For destructors, which go on without.
  DeviceGuard(int index, std::nothrow_t) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int index_;
  int previous_ = 0;
};

/// A thread that waits for it sleeps: a spinning one would take a core from the training.
class Event {
 public:
  Event() {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate");
  }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void wait() { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  void wait_on(cudaStream_t stream) { check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace shardow::kernels::cuda
