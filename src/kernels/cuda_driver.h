// CUDA's driver, found when it is first needed: nothing of CUDA is there when this is compiled, and a process without a
// driver gets a sentence. What the files of the CUDA path share: its functions, the current context, streams, events,
// kernels that are loaded.
//
// Signatures are those of cuda.h, of CUDA 12.0 and later, with handles and device addresses as pointers and
// enumerations as integers, which are passed alike (cuda_driver_test.cc compares them).
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <vector>

#include "shardow/tensor_view.h"

namespace shardow::kernels::cuda {

/// A library that dlopen() gave; it stays loaded.
struct Library {
  void* handle;
  const char* too_old;                             ///< why a function may be missing
  void (*fail)(const char* function, int status);  ///< throws
  void* find(const char* function) const;          ///< throws kUnsupported
};

/// One function of a library. A call throws, with the library's own message, unless it succeeds.
template <class... Parameters>
class Call {
 public:
  using Function = int (*)(Parameters...);

  Call(const Library& library, const char* name)
      : library_(library), name_(name), function_(reinterpret_cast<Function>(library.find(name))) {}
  void operator()(Parameters... parameters) const {
    if (const int status = function_(parameters...)) library_.fail(name_, status);
  }
  /// For destructors, which go on, and for callers that look at the status.
  int status(Parameters... parameters) const noexcept { return function_(parameters...); }

 private:
  const Library library_;
  const char* name_;
  Function function_;
};

struct Driver {
  Library library;

  Call<unsigned> init{library, "cuInit"};
  Call<int*> version{library, "cuDriverGetVersion"};
  Call<int, const char**> error_name{library, "cuGetErrorName"};
  Call<int, const char**> error_string{library, "cuGetErrorString"};

  Call<int*> device_count{library, "cuDeviceGetCount"};
  Call<int*, int> device{library, "cuDeviceGet"};
  Call<char*, int, int> device_name{library, "cuDeviceGetName"};
  Call<int*, int, int> device_attribute{library, "cuDeviceGetAttribute"};
  Call<void**, int> retain_primary_context{library, "cuDevicePrimaryCtxRetain"};
  Call<void*> push_context{library, "cuCtxPushCurrent_v2"};
  Call<void**> pop_context{library, "cuCtxPopCurrent_v2"};
  Call<> synchronize_context{library, "cuCtxSynchronize"};

  Call<void**, size_t> allocate{library, "cuMemAlloc_v2"};
  Call<void**, size_t*, void*> address_range{library, "cuMemGetAddressRange_v2"};
  Call<void*> free{library, "cuMemFree_v2"};
  Call<void**, size_t, unsigned> allocate_pinned{library, "cuMemHostAlloc"};
  Call<void*> free_pinned{library, "cuMemFreeHost"};
  Call<void*, const void*, size_t, void*> copy{library, "cuMemcpyAsync"};
  Call<void*, unsigned char, size_t, void*> set{library, "cuMemsetD8Async"};

  Call<void**, unsigned> create_stream{library, "cuStreamCreate"};
  Call<void*> destroy_stream{library, "cuStreamDestroy_v2"};
  Call<void*> synchronize{library, "cuStreamSynchronize"};
  Call<void*, void*, unsigned> wait_for_event{library, "cuStreamWaitEvent"};
  Call<void*, int*> is_capturing{library, "cuStreamIsCapturing"};
  Call<int*> exchange_capture_mode{library, "cuThreadExchangeStreamCaptureMode"};
  Call<void**, unsigned> create_event{library, "cuEventCreate"};
  Call<void*> destroy_event{library, "cuEventDestroy_v2"};
  Call<void*, void*> record{library, "cuEventRecord"};
  Call<void*> wait{library, "cuEventSynchronize"};

  Call<void**, const void*> load_module{library, "cuModuleLoadData"};
  Call<void**, void*, const char*> function{library, "cuModuleGetFunction"};
  Call<void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**> launch{
      library, "cuLaunchKernel"};
};

// Enumerators and flags of cuda.h.
inline constexpr int kOutOfDeviceMemory = 2, kCaptureRelaxed = 2, kMultiprocessors = 16, kCapabilityMajor = 75,
                     kCapabilityMinor = 76;
inline constexpr unsigned kPortable = 1, kNonBlocking = 1, kBlockingSync = 1, kDisableTiming = 2;

/// Throws kUnsupported with the reason where no device answers. Its functions throw kOutOfMemory or kInternal.
const Driver& driver();
int driver_version();  ///< 12040 for CUDA 12.4

/// A device that was used once.
struct UsedDevice {
  void* context;  ///< the primary one
  std::string name;
  int capability;  ///< 90 for 9.0
  int multiprocessors;
};
const UsedDevice& used_device(int index);

/// Kernels by their names in shardow::kernels::cuda with their template arguments; functions of the driver's, in the
/// same order. Compiled when they are first asked for, once a process and architecture, and loaded once a device; never
/// unloaded. May wait for what the device does. Throws kUnsupported, saying what was looked for, where there is no
/// NVRTC that both driver and device go with; kInternal with NVRTC's log where it refuses the sources.
const std::vector<void*>& load_kernels(const std::vector<std::string>& names, int index);

/// Makes a device's primary context, which torch uses too, the thread's current one, and what was before current again
/// at its end: no other device gets a context, half a gigabyte each. Meanwhile a graph that some thread captures
/// does not forbid the engine to allocate, to free and to wait: none of that belongs to what is captured. Calls of the
/// driver go through it.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index) { enter(index); }
  /// For destructors, which go on without.
  DeviceGuard(int index, std::nothrow_t) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Driver* operator->() const { return &driver(); }

 private:
  void enter(int index);

  bool pushed_ = false;
  int capture_mode_ = kCaptureRelaxed;
};

enum class StreamState { kReady, kCaptured, kGone };
StreamState state_of(const Device& device);

/// Does not wait for the default stream, nor that one for it. Ends when all that it has to do is done.
class Stream {
 public:
  explicit Stream(int index) : device_{Device::Kind::kCuda, index} {
    DeviceGuard(index)->create_stream(&device_.stream, kNonBlocking);
  }
  ~Stream() {
    drain();
    static_cast<void>(DeviceGuard(device_.index, std::nothrow)->destroy_stream.status(get()));
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* get() const { return device_.stream; }
  const Device& device() const { return device_; }  ///< with this stream
  /// The host waits until nothing is under way, however that ended.
  void drain() noexcept { static_cast<void>(DeviceGuard(device_.index, std::nothrow)->synchronize.status(get())); }

 private:
  Device device_;
};

/// Marks what a stream had to do when it was recorded. A thread that waits for it sleeps: a spinning one would take a
/// core from the training.
class Event {
 public:
  explicit Event(int index) : index_(index) {
    DeviceGuard(index)->create_event(&event_, kDisableTiming | kBlockingSync);
  }
  ~Event() { static_cast<void>(DeviceGuard(index_, std::nothrow)->destroy_event.status(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void* get() const { return event_; }
  void record(void* stream) { DeviceGuard(index_)->record(event_, stream); }
  void wait() { DeviceGuard(index_)->wait(event_); }
  void hold(void* stream) { DeviceGuard(index_)->wait_for_event(stream, event_, 0); }  ///< waits, on the device
  /// Puts what `stream` is given from here on behind what `behind` has to do by now. A capture can't wait for what is
  /// outside of it. Where `behind` is gone, the host waits for all that the device has to do.
  void order(void* stream, void* behind);

 private:
  int index_;
  void* event_ = nullptr;
};

}  // namespace shardow::kernels::cuda
