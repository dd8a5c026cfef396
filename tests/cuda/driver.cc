// The functions of libcuda.so.1 that the engine and its tests use. NVIDIA's signatures, with handles and device
// addresses as pointers.
#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fake.h"

namespace shardow::fake {

namespace {

thread_local std::vector<int> contexts_of_thread;
thread_local int mode_of_thread = kGlobal;

thread_local int depth = 0;

/// Begins most functions: the device goes on, others have their turns, and the log has what is called.
struct Entered : std::unique_lock<std::mutex> {
  explicit Entered(const char* what = nullptr, void* stream = nullptr, const char* function = __builtin_FUNCTION()) {
    ++depth;
    if (contexts_of_thread.empty()) give_up(std::string(function) + " without a current context");
    std::unique_lock<std::mutex>::operator=(locked());
    world().streams.some(*this);
    if (what != nullptr) world().note(what, stream);
  }
  ~Entered() { --depth; }
};

/// Not kSuccess where the device has failed for good.
Result state() {
  return broken() ? kIllegalAddress : kSuccess;
}

Result lose(Capture& capture, Result result) {
  capture.invalid = true;
  return result;
}

/// Checks a call that no graph repeats: captures forbid it by their modes and the thread's, and are lost by it.
Result outside_of_captures() {
  Result result = kSuccess;
  if (mode_of_thread == kRelaxed) return result;
  for (const Stream& stream : world().streams.all()) {
    if (stream.capture == nullptr) continue;
    const bool own = stream.capture->thread == std::this_thread::get_id();
    if (own ? stream.capture->mode != kRelaxed : stream.capture->mode == kGlobal && mode_of_thread == kGlobal)
      result = lose(*stream.capture, kCaptureUnsupported);
  }
  return result;
}

Stream* stream_of(void* handle) {
  return world().streams.find(current_device(), handle);
}

std::shared_ptr<Capture> capture_of(void* handle) {
  const Stream* const stream = stream_of(handle);
  return stream != nullptr ? stream->capture : nullptr;
}

bool is_gone(void* handle) {
  return handle != nullptr && stream_of(handle) == nullptr;
}

bool is_current(void* handle) {
  return handle == nullptr || (!is_gone(handle) && stream_of(handle)->device == current_device());
}

/// The block that an address lies in.
const Block& block_of(const void* address) {
  return world().memory.find(address);
}

/// Into the stream, or into the graph that it is captured into. `touched`: addresses that the work is given.
Result enqueue(void* handle, Work work, const std::vector<const void*>& touched) {
  if (const Result result = state()) return result;
  if (is_gone(handle)) return kInvalidHandle;
  for (const void* address : touched) work.blocks.push_back(block_of(address));
  const auto capture = capture_of(handle);
  if (capture == nullptr) {
    for (const Stream& other : world().streams.all())
      if (handle == nullptr && other.blocking && other.capture != nullptr)
        return lose(*other.capture, kCaptureImplicit);
    world().streams.add(current_device(), handle, std::move(work));
    return state();
  }
  if (capture->invalid) return kCaptureInvalidated;
  capture->graph.push_back(std::move(work));
  return kSuccess;
}

Result allocate(void** memory, size_t bytes, bool pinned) {
  if (const Result result = state()) return result;
  if (const Result result = outside_of_captures()) return result;
  int& left = world().until_allocation_fails;
  const bool refused = left >= 0 && left-- == 0;
  *memory = refused ? nullptr : world().memory.take(bytes, pinned);
  return *memory != nullptr ? kSuccess : kOutOfMemory;
}

Result wait_for(std::unique_lock<std::mutex>& lock, const std::vector<Mark>& marks) {
  if (const Result result = outside_of_captures()) return result;
  world().streams.until(lock, [&] { return std::all_of(marks.begin(), marks.end(), done); });
  return state();
}

/// Aborts where work is under way that was given the memory: CUDA's functions wait for the device, mostly.
Result release(void* memory) {
  if (const Result result = outside_of_captures()) return result;
  const uint64_t number = block_of(memory).number;
  if (!broken() && number != 0 && world().streams.uses(number))
    give_up("memory is freed that work under way was given");
  return world().memory.give(memory) ? kSuccess : kInvalidValue;
}

/// An ELF file of CUDA 12's ABI (version 7), or of 13's where the driver is of 13.
std::string checked_image(const void* image) {
  if (std::strncmp(static_cast<const char*>(image), ELFMAG, SELFMAG) != 0) {
    const std::string ptx = static_cast<const char*>(image);
    return ptx.find(".version") != std::string::npos ? ptx : "";
  }
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof(header));
  if (header.e_ident[EI_ABIVERSION] > 7 && number_from("FAKE_CUDA_VERSION", 12040) < 13000) return {};
  const unsigned code_for = header.e_flags & 0xff, capability = number_from("FAKE_CUDA_CAPABILITY", 90);
  if (header.e_ident[EI_ABIVERSION] == 7 && code_for / 10 != capability / 10) return {};  // another generation's
  return {static_cast<const char*>(image), header.e_shoff + size_t{header.e_shnum} * header.e_shentsize};
}

struct Text {
  const char *name = nullptr, *text = nullptr;
};

/// Describes errors that users read; the engine gives the numbers of others.
Text text_of(int result) {
  if (result == kOutOfMemory) return {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"};
  if (result == kNoDevice) return {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"};
  return {};
}

}  // namespace

bool inside() {
  return depth > 0;
}

int current_device() {
  return contexts_of_thread.empty() ? -1 : contexts_of_thread.back();
}

}  // namespace shardow::fake

using namespace shardow::fake;

#pragma GCC visibility push(default)
extern "C" {

int cuInit(unsigned) {
  return number_from("FAKE_CUDA_INIT", kSuccess);
}
int cuDriverGetVersion(int* version) {
  return give(version, number_from("FAKE_CUDA_VERSION", 12040));
}
int cuGetErrorName(int result, const char** name) {
  return give(name, text_of(result).name);
}
int cuGetErrorString(int result, const char** text) {
  return give(text, text_of(result).text);
}
int cuGetExportTable(const void** table, const void*) {  // NVRTC asks for it
  *table = nullptr;
  return kNotFound;
}

int cuDeviceGetCount(int* count) {
  return give(count, number_from("FAKE_CUDA_DEVICES", 8));  // reset() says how many of them are there
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return index >= 0 && index < world().options.num_devices ? kSuccess : kInvalidDevice;
}
int cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, static_cast<size_t>(length), "Fake H100");
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int capability = number_from("FAKE_CUDA_CAPABILITY", 90);
  return give(value, attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 4);
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return give(context, reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1));
}
int cuCtxPushCurrent_v2(void* context) {
  const auto lock = locked();
  contexts_of_thread.push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
  world().contexts.insert(contexts_of_thread.back());
  return kSuccess;
}
int cuCtxPopCurrent_v2(void**) {
  contexts_of_thread.pop_back();
  return kSuccess;
}
int cuCtxSynchronize() {
  Entered lock("host waits for device");
  std::vector<Mark> marks;
  for (const Stream& stream : world().streams.all()) {
    if (stream.device != current_device()) continue;
    if (stream.capture != nullptr) return lose(*stream.capture, kCaptureUnsupported);
    marks.push_back(stream.last);
  }
  return wait_for(lock, marks);
}

int cuMemAlloc_v2(void** memory, size_t bytes) {
  const Entered lock("malloc");
  return allocate(memory, bytes, false);
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  const Entered lock("pin");
  return allocate(memory, bytes, true);
}
int cuMemFree_v2(void* memory) {
  const Entered lock("free");
  return release(memory);
}
int cuMemFreeHost(void* memory) {
  const Entered lock("unpin");
  return release(memory);
}
int cuMemGetAddressRange_v2(const void** begin, size_t* bytes, const void* memory) {
  const Entered lock;
  const Block& block = block_of(memory);
  *begin = block.begin;
  *bytes = block.bytes;
  return block.begin != nullptr ? kSuccess : kNotFound;
}
/// In pieces, which a kernel of another stream may come between.
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream) {
  const Entered lock("copy", stream);
  World& all = world();
  const int number = all.num_copies++;
  if (number >= all.failing_from && number < all.failing_to) return kInvalidValue;
  for (const void* begin : {static_cast<const void*>(to), from}) {
    const void* const last = static_cast<const std::byte*>(begin) + (bytes > 0 ? bytes - 1 : 0);
    if (block_of(begin).number != block_of(last).number) return kInvalidValue;
  }
  if (block_of(to).pinned) all.copied_to_host += static_cast<int64_t>(bytes);
  if (block_of(from).pinned) all.copied_to_device += static_cast<int64_t>(bytes);
  const size_t parts = bytes >= 64 ? 3 : 1;
  const auto part = [=](size_t which, Random*) {
    const size_t begin = bytes * which / parts, end = bytes * (which + 1) / parts;
    if (end > begin)
      std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin, end - begin);
  };
  return enqueue(stream, on_device({parts, part}), {to, from});
}
int cuMemsetD8Async(void* memory, unsigned char value, size_t bytes, void* stream) {
  const Entered lock("set", stream);
  return enqueue(stream, on_device({1, [=](size_t, Random*) { std::memset(memory, value, bytes); }}), {memory});
}

int cuStreamCreate(void** stream, unsigned flags) {
  const Entered lock((flags & 1) != 0 ? "stream" : "stream that the default one blocks");
  if (const Result result = state()) return result;
  return give(stream, world().streams.make(current_device(), (flags & 1) == 0));
}
int cuStreamDestroy_v2(void* handle) {
  const Entered lock("end of stream", handle);
  if (handle == nullptr || is_gone(handle)) return kInvalidHandle;
  Stream* const stream = stream_of(handle);  // which does what it has, without its handle
  return give(&stream->handle, stream);
}
int cuStreamSynchronize(void* stream) {
  Entered lock("host waits", stream);
  if (is_gone(stream)) return kInvalidHandle;
  if (const auto capture = capture_of(stream)) return lose(*capture, kCaptureUnsupported);
  return wait_for(lock, {world().streams.at(current_device(), stream).last});
}
int cuStreamWaitEvent(void* stream, Event* event, unsigned) {
  const Entered lock("stream waits", stream);
  World& all = world();
  if (const Result result = state()) return result;
  if (!all.events.count(event) || is_gone(stream)) return kInvalidHandle;
  if (const auto capture = capture_of(stream))
    return event->captured == capture ? kSuccess : lose(*capture, kCaptureIsolation);
  if (event->captured != nullptr) {  // joins the capture, behind all that it has
    all.streams.at(current_device(), stream).capture = event->captured;
  } else if (event->mark != nullptr && !all.drops_waits) {
    all.streams.add(current_device(), stream, Work{}, {event->mark});
  }
  return kSuccess;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, mode_of_thread);
  return kSuccess;
}

int cuEventCreate(Event** event, unsigned flags) {
  const Entered lock((flags & 1) != 0 ? "event that sleeps" : "event that spins");
  if (const Result result = state()) return result;
  *event = new Event{nullptr, current_device(), nullptr};
  world().events.insert(*event);
  return kSuccess;
}
int cuEventDestroy_v2(Event* event) {
  const Entered lock("end of event");
  if (world().events.erase(event) == 0) return kInvalidHandle;
  delete event;
  return kSuccess;
}
int cuEventRecord(Event* event, void* stream) {
  const Entered lock("record", stream);
  if (const Result result = state()) return result;
  if (!world().events.count(event) || event->device != current_device() || !is_current(stream)) return kInvalidHandle;
  event->captured = capture_of(stream);
  if (event->captured == nullptr) event->mark = world().streams.add(current_device(), stream, Work{});
  return kSuccess;
}
int cuEventSynchronize(Event* event) {
  Entered lock("host waits");
  if (!world().events.count(event)) return kInvalidHandle;
  if (event->captured != nullptr) return lose(*event->captured, kCapturedEvent);
  return wait_for(lock, {event->mark});
}

int cuStreamIsCapturing(void* stream, int* status) {
  const Entered lock;
  if (is_gone(stream)) return kInvalidHandle;
  const auto capture = capture_of(stream);
  return give(status, capture == nullptr ? 0 : capture->invalid ? 2 : 1);
}
int cuStreamBeginCapture_v2(void* stream, int mode) {
  const Entered lock;
  if (stream == nullptr || is_gone(stream) || capture_of(stream) != nullptr) return kCaptureUnsupported;
  stream_of(stream)->capture =
      std::make_shared<Capture>(Capture{{}, stream, static_cast<CaptureMode>(mode), std::this_thread::get_id(), false});
  return kSuccess;
}
int cuStreamEndCapture(void* stream, Graph** graph) {
  const Entered lock;
  const auto capture = capture_of(stream);
  if (capture == nullptr || capture->origin != stream) return kCaptureUnmatched;
  for (Stream& other : world().streams.all()) {
    if (other.capture == capture) other.capture = nullptr;
  }
  *graph = capture->invalid ? nullptr : new Graph(capture->graph);
  return capture->invalid ? kCaptureInvalidated : kSuccess;
}
int cuGraphInstantiateWithFlags(Graph** replay, Graph* graph, unsigned long long) {
  return give(replay, new Graph(*graph));
}
int cuGraphLaunch(Graph* replay, void* stream) {
  const Entered lock("replay", stream);
  for (const Work& node : *replay) {
    for (const Block& block : node.blocks) {
      if (block_of(block.begin).number != block.number) return kIllegalAddress;  // a device may notice, or not
    }
  }
  for (const Work& node : *replay) {
    if (const Result result = enqueue(stream, node, {})) return result;
  }
  return state();
}
int cuGraphDestroy(Graph* graph) {
  delete graph;
  return kSuccess;
}
int cuGraphExecDestroy(Graph* replay) __attribute__((alias("cuGraphDestroy")));

int cuModuleLoadData(Module** module, const void* image) {
  const Entered lock("load");  // may wait for what the device does
  if (const Result result = outside_of_captures()) return result;
  *module = &world().modules.emplace_back(Module{checked_image(image), current_device()});
  return (*module)->image.empty() ? kInvalidImage : kSuccess;
}
int cuModuleGetFunction(Kernel** function, Module* module, const char* name) {
  const Entered lock;
  const Twin* const twin = twin_of(name);
  if (twin == nullptr || module->image.find(name) == std::string::npos) return kNotFound;
  return give(function, &world().kernels.emplace_back(Kernel{plain_name(name), twin, module->device}));
}
int cuLaunchKernel(Kernel* kernel, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                   void* stream, void** arguments, void**) {
  const Entered lock(kernel->name.rfind("update_kernel", 0) == 0 ? "update" : "launch", stream);
  if (grid == 0 || block == 0 || block > 1024) return kInvalidValue;
  if (kernel->device != current_device() || !is_current(stream)) return kInvalidHandle;
  const size_t each = (grid + 63) / 64, parts = (grid + each - 1) / each;  // blocks to a part
  const auto part = [=, body = kernel->twin->bind(arguments)](size_t number, Random* random) {
    for (size_t index = number * each; index < std::min<size_t>((number + 1) * each, grid); ++index)
      run_block(grid, block, static_cast<unsigned>(index), body, random);
  };
  std::vector<const void*> addresses;  // that the arguments have in them, structs included
  for (size_t i = 0; i < kernel->twin->sizes.size(); ++i) {
    for (size_t at = 0; at + sizeof(void*) <= kernel->twin->sizes[i]; at += sizeof(void*))
      std::memcpy(&addresses.emplace_back(), static_cast<const std::byte*>(arguments[i]) + at, sizeof(void*));
  }
  return enqueue(stream, on_device({parts, part}), addresses);
}
}
