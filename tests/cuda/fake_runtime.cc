#include "fake_runtime.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace shardow::fake {
namespace {

struct World {
  int num_devices = 1;
  std::vector<Call> log;
  std::set<int> contexts;
  std::map<const void*, size_t> memory, pinned;
  std::set<void*> captured;
  int until_failure = -1;
  int until_copy_fails = -1, times = 0;
  Copied copied;
};

World world;
std::recursive_mutex mutex;
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

/// As CUDA 12 and later: whatever is asked of the runtime makes the current device's context.
void note(const std::string& what, void* stream = nullptr, const void* subject = nullptr) {
  world.contexts.insert(current);
  Call call;
  call.what = what;
  call.device = current;
  call.stream = stream;
  call.subject = subject;
  world.log.push_back(call);
}

cudaError_t allocate(const char* what, void** memory, size_t bytes) {
  const std::lock_guard lock(mutex);
  note(what);
  if (world.until_failure >= 0 && world.until_failure-- == 0) return last = cudaErrorMemoryAllocation;
  *memory = std::malloc(bytes);
  world.memory[*memory] = bytes;
  if (std::string(what) == "pin") world.pinned[*memory] = bytes;
  return cudaSuccess;
}

cudaError_t release(const char* what, void* memory) {
  const std::lock_guard lock(mutex);
  note(what, nullptr, memory);
  if (memory == nullptr) return cudaSuccess;
  world.pinned.erase(memory);
  if (world.memory.erase(memory) == 0) return last = cudaErrorInvalidValue;
  std::free(memory);
  return cudaSuccess;
}

bool on_host(const void* memory) {
  const auto found = world.pinned.upper_bound(memory);
  return found != world.pinned.begin() && std::prev(found)->first <= memory &&
         memory < static_cast<const char*>(std::prev(found)->first) + std::prev(found)->second;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, void* stream) {
  const std::lock_guard lock(mutex);
  note("copy", stream, to);
  if (world.until_copy_fails == 0 && world.times != 0) {
    if (world.times > 0) --world.times;
    return last = cudaErrorInvalidValue;
  }
  if (world.until_copy_fails > 0) --world.until_copy_fails;
  std::memcpy(to, from, bytes);
  if (kind == cudaMemcpyDeviceToHost || (kind == cudaMemcpyDefault && on_host(to))) world.copied.to_host += static_cast<int64_t>(bytes);
  if (kind == cudaMemcpyHostToDevice || (kind == cudaMemcpyDefault && on_host(from))) world.copied.to_device += static_cast<int64_t>(bytes);
  return cudaSuccess;
}

/// Filled before main(), whatever is made first.
std::map<const void*, std::string>& kernel_names() {
  static std::map<const void*, std::string> names;
  return names;
}

int primary_context_state(int device, unsigned* flags, int* active) {
  const std::lock_guard lock(mutex);
  *flags = 0;
  *active = world.contexts.count(device) > 0 ? 1 : 0;
  return 0;
}

}  // namespace

void reset(int num_devices, std::optional<uint64_t>) {
  const std::lock_guard lock(mutex);
  world = World{};
  world.num_devices = num_devices;
  current = 0;
}

std::vector<Call> calls() {
  const std::lock_guard lock(mutex);
  return world.log;
}

std::vector<Call> calls_of(const std::string& what) {
  std::vector<Call> found;
  for (const Call& call : calls()) {
    if (call.what == what) found.push_back(call);
  }
  return found;
}

void clear() {
  const std::lock_guard lock(mutex);
  world.log.clear();
}

std::vector<int> contexts() {
  const std::lock_guard lock(mutex);
  return {world.contexts.begin(), world.contexts.end()};
}

size_t allocated() {
  const std::lock_guard lock(mutex);
  size_t bytes = 0;
  for (const auto& [memory, size] : world.memory) bytes += size;
  return bytes;
}

void fail_allocation(int number) {
  const std::lock_guard lock(mutex);
  world.until_failure = number;
}

void run(int, void*) {}
void synchronize() {}
size_t pending() {
  return 0;
}
Copied copied() {
  const std::lock_guard lock(mutex);
  return world.copied;
}
void fail_copy(int number, int times) {
  const std::lock_guard lock(mutex);
  world.until_copy_fails = number;
  world.times = times;
}

void capture(void* stream, bool begins) {
  const std::lock_guard lock(mutex);
  if (begins) {
    world.captured.insert(stream);
  } else {
    world.captured.erase(stream);
  }
}

}  // namespace shardow::fake

using namespace shardow::fake;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = world.num_devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  const std::lock_guard lock(mutex);
  if (device < 0 || device >= world.num_devices) return last = cudaErrorInvalidDevice;
  current = device;
  world.contexts.insert(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const std::lock_guard lock(mutex);
  note("host waits for device");
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return std::exchange(last, cudaSuccess);
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::string(symbol) == "cuDevicePrimaryCtxGetState";
  *function = known ? reinterpret_cast<void*>(&primary_context_state) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return allocate("malloc", memory, bytes);
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  return allocate("pin", memory, bytes);
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return allocate("pin", memory, bytes);
}
cudaError_t cudaFree(void* memory) {
  return release("free", memory);
}
cudaError_t cudaFreeHost(void* memory) {
  return release("unpin", memory);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream);
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  const std::lock_guard lock(mutex);
  note("set", nullptr, memory);
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  note("set", stream, memory);
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const std::lock_guard lock(mutex);
  note(flags & cudaEventBlockingSync ? "event that sleeps" : "event that spins");
  *event = reinterpret_cast<cudaEvent_t>(new int);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(mutex);
  note("end of event", nullptr, event);
  delete reinterpret_cast<int*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  note("record", stream, event);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const std::lock_guard lock(mutex);
  note("host waits", nullptr, event);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(mutex);
  note("stream waits", stream, event);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const std::lock_guard lock(mutex);
  *stream = reinterpret_cast<cudaStream_t>(new int);
  note(flags & cudaStreamNonBlocking ? "stream" : "stream that the default one blocks", *stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  note("end of stream", stream);
  delete reinterpret_cast<int*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  note("host waits", stream);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::lock_guard lock(mutex);
  *status = world.captured.count(stream) > 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// What nvcc's code calls for kernels.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  kernel_names()[function] = name;
}

thread_local struct {
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3 block, void** arguments, size_t, cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  note("launch", stream, reinterpret_cast<const void*>(kernel));
  static_cast<void>(block);
  if (kernel_names()[reinterpret_cast<const void*>(kernel)].find("update_kernel") == std::string::npos) return cudaSuccess;
  Call& call = world.log.back();
  call.what = "update";
  call.step = *static_cast<const shardow::kernels::Step*>(arguments[1]);
  const auto* const latest = *static_cast<const shardow::kernels::Step* const*>(arguments[2]);
  call.by_pointer = latest != nullptr;
  call.subject = latest;
  return cudaSuccess;
}

}  // extern "C"
