// The runtime's functions: devices, memory, copies, streams, events, launches. Graphs are in graphs.cc.
#include <algorithm>
#include <cstring>
#include <utility>

#include "world.h"

using namespace shardow::fake;

namespace shardow::fake {

namespace {

thread_local cudaError_t last_error = cudaSuccess;

int primary_context_state(int device, unsigned* flags, int* active) {
  const std::lock_guard lock(world().streams.mutex());
  *flags = 0;
  *active = world().contexts.count(device) > 0 ? 1 : 0;
  return 0;
}

cudaError_t allocate(const char* what, void** memory, size_t bytes, bool pinned) {
  const auto lock = called();
  world().note(what);
  if (state() != cudaSuccess) return last_error;
  if (capturing_any()) return failed(cudaErrorStreamCaptureUnsupported);
  int& left = world().until_allocation_fails;
  const bool refused = left >= 0 && left-- == 0;
  *memory = refused ? nullptr : world().memory.take(bytes, pinned);
  return *memory != nullptr ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

/// Waits for all that the devices have to do, as CUDA's functions do.
cudaError_t release(const char* what, void* memory) {
  auto lock = called();
  world().note(what, nullptr, memory);
  if (memory == nullptr) return cudaSuccess;
  const auto marks = world().streams.all(std::nullopt);
  world().streams.until(lock, [&] {
    return std::all_of(marks.begin(), marks.end(), [](const MarkPtr& one) { return !one || one->done; });
  });
  return world().memory.give(memory) ? cudaSuccess : failed(cudaErrorInvalidValue);
}

bool copy_fails() {
  World& all = world();
  if (all.until_copy_fails > 0) return (--all.until_copy_fails, false);
  if (all.until_copy_fails < 0 || all.times == 0) return false;
  if (all.times > 0) --all.times;
  return true;
}

/// In pieces, which a kernel of another stream may come between. What is not pinned is read at once and written before
/// the call returns.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, void* stream, bool waits) {
  auto lock = called();
  World& all = world();
  all.note("copy", stream, to);
  if (state() != cudaSuccess) return last_error;
  if (copy_fails()) return failed(cudaErrorInvalidValue);
  const bool pinned_to = all.memory.pinned(to), pinned_from = all.memory.pinned(from);
  const bool to_host = kind == cudaMemcpyDeviceToHost || (kind == cudaMemcpyDefault && pinned_to);
  const bool to_device = kind == cudaMemcpyHostToDevice || (kind == cudaMemcpyDefault && pinned_from);
  if (to_host) all.copied.to_host += static_cast<int64_t>(bytes);
  if (to_device) all.copied.to_device += static_cast<int64_t>(bytes);
  std::shared_ptr<std::vector<std::byte>> kept;
  if (to_device && !pinned_from && !capturing(stream)) {
    const auto* const begin = static_cast<const std::byte*>(from);
    kept = std::make_shared<std::vector<std::byte>>(begin, begin + bytes);
    from = kept->data();
  }
  const size_t parts = bytes >= 64 ? 3 : 1;
  const auto part = [=](size_t number, Random*) {
    static_cast<void>(kept);
    const size_t begin = bytes * number / parts, end = bytes * (number + 1) / parts;
    if (end > begin)
      std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin, end - begin);
  };
  const MarkPtr mark = enqueue(stream, on_device({parts, part}));
  if (mark != nullptr && (waits || (to_host && !pinned_to))) all.streams.until(lock, [&] { return mark->done; });
  return state();
}

cudaError_t set(void* memory, int value, size_t bytes, void* stream) {
  const auto lock = called();
  world().note("set", stream, memory);
  if (state() != cudaSuccess) return last_error;
  enqueue(stream, on_device({1, [=](size_t, Random*) { std::memset(memory, value, bytes); }}));
  return cudaSuccess;
}

}  // namespace

cudaError_t failed(cudaError_t error) {
  return last_error = error;
}

cudaError_t launch(dim3 grid, dim3 block, cudaStream_t stream, const Kernel& kernel) {
  const auto lock = called();
  World& all = world();
  all.note("launch", stream, kernel.function);
  if (state() != cudaSuccess) return last_error;
  if (grid.x == 0 || block.x == 0 || block.x > 1024) return failed(cudaErrorInvalidValue);
  if (kernel.arguments.size() == 3 && *kernel.arguments[1].first == typeid(kernels::Step) && all.options.log) {
    Call& call = all.log.back();
    call.what = "update";
    call.step = *static_cast<const kernels::Step*>(kernel.arguments[1].second);
    call.subject = *static_cast<const kernels::Step* const*>(kernel.arguments[2].second);
    call.by_pointer = call.subject != nullptr;
  }
  const size_t each = (grid.x + 63) / 64, parts = (grid.x + each - 1) / each;  // blocks to a part
  enqueue(stream, on_device({parts, [=, body = kernel.body](size_t number, Random* random) {
                               for (size_t index = number * each; index < std::min<size_t>((number + 1) * each, grid.x);
                                    ++index) {
                                 run_block(grid, block, static_cast<unsigned>(index), body, random);
                               }
                             }}));
  return cudaSuccess;
}

}  // namespace shardow::fake

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = world().options.num_devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  const std::lock_guard lock(world().streams.mutex());
  if (device < 0 || device >= world().options.num_devices) return failed(cudaErrorInvalidDevice);
  current_device() = device;
  world().contexts.insert(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  auto lock = called();
  world().note("host waits for device");
  const auto marks = world().streams.all(current_device());
  world().streams.until(lock, [&] {
    return std::all_of(marks.begin(), marks.end(), [](const MarkPtr& one) { return !one || one->done; });
  });
  return state();
}
cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInvalidValue: return "invalid argument";
    default: return "an error";
  }
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    default: return "cudaErrorUnknown";
  }
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::string(symbol) == "cuDevicePrimaryCtxGetState";
  *function = known ? reinterpret_cast<void*>(&primary_context_state) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return allocate("malloc", memory, bytes, false);
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return allocate("pin", memory, bytes, true);
}
cudaError_t cudaFree(void* memory) {
  return release("free", memory);
}
cudaError_t cudaFreeHost(void* memory) {
  return release("unpin", memory);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, false);
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  return set(memory, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  return set(memory, value, bytes, stream);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const auto lock = called();
  if (state() != cudaSuccess) return last_error;
  *stream = reinterpret_cast<cudaStream_t>(new char);
  world().note(flags & cudaStreamNonBlocking ? "stream" : "stream that the default one blocks", *stream);
  world().streams.make(current_device(), *stream, (flags & cudaStreamNonBlocking) == 0);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const auto lock = called();
  world().note("end of stream", stream);
  world().streams.retire(stream);
  delete reinterpret_cast<char*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  auto lock = called();
  world().note("host waits", stream);
  if (capturing(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  const MarkPtr mark = world().streams.last(current_device(), stream);
  if (mark != nullptr) world().streams.until(lock, [&] { return mark->done; });
  return state();
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const auto lock = called();
  const MarkPtr mark = world().streams.last(current_device(), stream);
  return mark == nullptr || mark->done ? state() : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto lock = called();
  world().note("stream waits", stream, event);
  if (state() != cudaSuccess) return last_error;
  if (event->captured != nullptr && !capturing(stream)) {  // joins the capture, behind all that it has
    for (const auto& [other, graph] : world().captures) {
      if (graph.get() == event->captured) return (world().captures[stream] = graph, cudaSuccess);
    }
  }
  if (capturing(stream)) return event->captured != nullptr ? cudaSuccess : failed(cudaErrorStreamCaptureIsolation);
  if (event->mark != nullptr && !world().drops_waits)
    world().streams.add(current_device(), stream, Work{}, {event->mark});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const auto lock = called();
  world().note(flags & cudaEventBlockingSync ? "event that sleeps" : "event that spins");
  if (state() != cudaSuccess) return last_error;
  *event = new CUevent_st{nullptr, current_device(), nullptr};
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const auto lock = called();
  world().note("end of event", nullptr, event);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto lock = called();
  world().note("record", stream, event);
  if (state() != cudaSuccess) return last_error;
  const auto captured = world().captures.find(stream);
  event->captured = captured != world().captures.end() ? captured->second.get() : nullptr;
  if (event->captured == nullptr) event->mark = world().streams.add(current_device(), stream, Work{});
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  auto lock = called();
  world().note("host waits", nullptr, event);
  const MarkPtr mark = event->mark;
  if (mark != nullptr) world().streams.until(lock, [&] { return mark->done; });
  return state();
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto lock = called();
  return event->mark == nullptr || event->mark->done ? state() : cudaErrorNotReady;
}

}  // extern "C"
