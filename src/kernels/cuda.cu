// The host's side of the CUDA kernels: tables in device memory, one launch per update, errors.
//
// How a step reaches the kernel: an update() outside of a capture passes it by value, so there is nothing to copy and nothing to wait for.
// A captured update() passes the address of a step in device memory instead; set_step() writes that one through pinned memory, in stream
// order: after every earlier replay, before every later one. Pinned slots are used in turn, so that the host waits only when it is kSlots
// replays ahead.
//
// How streams follow one another: a table knows the stream that it used last; the first use of another one waits, on the device, for what
// the last one had to do. A capture can't wait for what is outside of it: whoever captures has synchronised before, as torch does.
//
// Contexts: a process that uses one device of eight must not get contexts on the others, half a gigabyte each. Making a device current
// makes its context, so the guard makes the previous one current again only where that one has a context already (torch does the same).
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/cuda.h"
#include "kernels/cuda_move.cuh"
#include "kernels/cuda_update.cuh"
#include "kernels/row.h"
#include "shardow/error.h"

namespace shardow::kernels::cuda {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // an error that is not sticky must not be reported twice
  const Code code = status == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kInternal;
  throw Error(code, std::string("CUDA: ") + what + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

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
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, kSince, cudaEnableDefault, &result);
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<GetState>(found) : nullptr;
  }();
  unsigned flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(index, &flags, &active) == 0 && active != 0;
}

/// Makes a device current, and the previous one on the way out if that has a context.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index) : index_(index) {
    require_device();
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    check(cudaSetDevice(index), "cudaSetDevice");  // also where it is current already: a thread's first call makes it so
  }
  /// For destructors, which go on without.
  DeviceGuard(int index, std::nothrow_t) noexcept : index_(index) {
    static_cast<void>(cudaGetDevice(&previous_));
    static_cast<void>(cudaSetDevice(index));
  }
  ~DeviceGuard() {
    if (previous_ != index_ && has_context(previous_)) static_cast<void>(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int index_;
  int previous_ = 0;
};

/// Of the current device, which is current too when it goes.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, std::max<size_t>(count, 1) * sizeof(T)), "cudaMalloc");
    data_ = static_cast<T*>(memory);
  }
  ~DeviceArray() { static_cast<void>(cudaFree(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

template <class T>
class PinnedArray {
 public:
  explicit PinnedArray(size_t count) {
    void* memory = nullptr;
    check(cudaMallocHost(&memory, count * sizeof(T)), "cudaMallocHost");
    data_ = static_cast<T*>(memory);
  }
  ~PinnedArray() { static_cast<void>(cudaFreeHost(data_)); }
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

/// A thread that waits for it sleeps: a spinning one would take a core from the training.
class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate"); }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void wait() { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  void wait_on(cudaStream_t stream) { check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Elements per tile: enough tiles to give every warp of the device one, but none so small that its preparation shows.
uint32_t tile_elements(std::span<const Chunk> chunks, int multiprocessors) {
  constexpr int64_t kLeast = 2 * kGroup, kMost = 16 * kGroup, kWarpsEach = 32;
  int64_t total = 0;
  for (const Chunk& chunk : chunks) total += chunk.count;
  const int64_t share = total / (multiprocessors * kWarpsEach) / kLeast * kLeast;
  return static_cast<uint32_t>(std::clamp(share, kLeast, kMost));
}

std::vector<Tile> make_tiles(std::span<const Chunk> chunks, uint32_t elements) {
  std::vector<Tile> tiles;
  for (size_t c = 0; c < chunks.size(); ++c) {
    for (int64_t begin = 0; begin < chunks[c].count; begin += elements) {
      tiles.push_back({static_cast<uint32_t>(c), static_cast<uint32_t>(std::min<int64_t>(elements, chunks[c].count - begin)), begin});
    }
  }
  return tiles;
}

using Kernel = void (*)(Work, Step, const Step*);

/// The kernel for a table: of one pair of dtypes for the common ones, else one that looks at each chunk.
Kernel kernel_for(std::span<const Chunk> chunks) {
  const auto all = [&](auto&& property) {
    return std::all_of(chunks.begin(), chunks.end(), [&](const Chunk& chunk) { return property(chunk) == property(chunks[0]); });
  };
  if (chunks.empty() || !all([](const Chunk& chunk) { return chunk.average_dtype; })) return update_kernel<Mixed, Mixed>;
  Kernel kernel = nullptr;
  const bool one_pair = all([](const Chunk& chunk) { return chunk.parameter_dtype; });
  with_dtype(chunks[0].average_dtype, [&]<class S>() {
    kernel = update_kernel<Mixed, S>;
    if constexpr (std::is_same_v<S, float>) {
      if (one_pair && chunks[0].parameter_dtype == DType::kF32) kernel = update_kernel<float, S>;
      if (one_pair && chunks[0].parameter_dtype == DType::kBF16) kernel = update_kernel<BF16, S>;
      if (one_pair && chunks[0].parameter_dtype == DType::kF16) kernel = update_kernel<F16, S>;
    }
  });
  return kernel != nullptr ? kernel : update_kernel<Mixed, Mixed>;
}

int multiprocessors(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

class TableImpl final : public Table {
 public:
  TableImpl(std::span<const Chunk> chunks, Device device) : device_(device), kernel_(kernel_for(chunks)) {
    const std::vector<Tile> tiles = make_tiles(chunks, tile_elements(chunks, multiprocessors(device.index)));
    if (tiles.size() > 0xffffffffu) throw Error(Code::kUnsupported, "more than 2^32 tiles in one table");
    num_tiles_ = static_cast<uint32_t>(tiles.size());
    memory_ = std::make_unique<Memory>(chunks.size(), tiles.size());
    check(cudaMemcpy(memory_->chunks.get(), chunks.data(), chunks.size_bytes(), cudaMemcpyHostToDevice), "copy of the chunks");
    check(cudaMemcpy(memory_->tiles.get(), tiles.data(), tiles.size() * sizeof(Tile), cudaMemcpyHostToDevice), "copy of the tiles");
    check(cudaMemset(memory_->tally.get(), 0, sizeof(DeviceTally)), "reset of the tally");
    check(cudaMemset(memory_->step.get(), 0, sizeof(Step)), "reset of the step");
    check(cudaDeviceSynchronize(), "upload");  // before anything on a stream that does not wait for the default one
  }

  ~TableImpl() override {
    const DeviceGuard guard(device_.index, std::nothrow);
    memory_.reset();
  }

  void update(const Step& step) override {
    if (num_tiles_ == 0 || step.num_averages == 0) return;
    const DeviceGuard guard(device_.index);
    const Work work{memory_->chunks.get(), memory_->tiles.get(), num_tiles_, memory_->tally.get()};
    const unsigned blocks = (num_tiles_ + kWarps - 1) / kWarps;
    kernel_<<<blocks, kThreads, 0, stream()>>>(work, step, capturing(device_) ? memory_->step.get() : nullptr);
    check(cudaGetLastError(), "launch of update");
  }

  void set_step(const Step& step) override {
    const DeviceGuard guard(device_.index);
    if (capturing(device_))
      throw Error(Code::kInvalidArgument, "set_step() belongs before a replay, not into the capture: it would be replayed with it");
    const size_t slot = next_slot_++ % kSlots;
    Event& written = memory_->written[slot];
    written.wait();
    Step* const pinned = memory_->pinned.get() + slot;
    std::memcpy(pinned, &step, sizeof(Step));
    check(cudaMemcpyAsync(memory_->step.get(), pinned, sizeof(Step), cudaMemcpyHostToDevice, stream()), "copy of the step");
    written.record(stream());
  }

  Tally read_tally() override {
    const DeviceGuard guard(device_.index);
    DeviceTally* const read = memory_->read.get();
    check(cudaMemcpyAsync(read, memory_->tally.get(), sizeof(DeviceTally), cudaMemcpyDeviceToHost, stream()), "copy of the tally");
    check(cudaMemsetAsync(memory_->tally.get(), 0, sizeof(DeviceTally), stream()), "reset of the tally");
    memory_->done.record(stream());
    memory_->done.wait();
    return {static_cast<int64_t>(read->non_finite), read->non_finite > 0 ? static_cast<int64_t>(0xffffffffu - read->last_chunk) : -1};
  }

  void set_stream(void* stream) override {
    if (stream == device_.stream) return;
    const DeviceGuard guard(device_.index);
    Device next = device_;
    next.stream = stream;
    if (!capturing(device_) && !capturing(next)) {
      memory_->done.record(static_cast<cudaStream_t>(device_.stream));
      memory_->done.wait_on(static_cast<cudaStream_t>(stream));
    }
    device_ = next;
  }

 private:
  static constexpr size_t kSlots = 16;

  struct Memory {
    Memory(size_t num_chunks, size_t num_tiles)
        : chunks(num_chunks), tiles(num_tiles), tally(1), step(1), pinned(kSlots), read(1), written(kSlots) {}

    DeviceArray<Chunk> chunks;
    DeviceArray<Tile> tiles;
    DeviceArray<DeviceTally> tally;
    DeviceArray<Step> step;
    PinnedArray<Step> pinned;
    PinnedArray<DeviceTally> read;
    std::vector<Event> written;
    Event done;  // of what the host or another stream waits for
  };

  cudaStream_t stream() const { return static_cast<cudaStream_t>(device_.stream); }

  Device device_;
  Kernel kernel_;
  uint32_t num_tiles_;
  std::unique_ptr<Memory> memory_;
  size_t next_slot_ = 0;
};

/// Enough threads to fill any device; the kernels stride over the rest.
unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::clamp<int64_t>((count + kThreads * kPerLane - 1) / (kThreads * kPerLane), 1, 4096));
}

/// Empty where a device answers.
std::string reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return {};
  static_cast<void>(cudaGetLastError());
  return std::string("no CUDA device answers: ") + (status == cudaSuccess ? "none is installed" : cudaGetErrorString(status));
}

const std::string& cached_reason() {
  static const std::string text = reason();
  return text;
}

}  // namespace

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
  if (device.kind != Device::Kind::kCuda || device.stream == nullptr) return false;  // the default stream can't be captured
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(device.stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

std::unique_ptr<Table> upload(std::span<const Chunk> chunks, Device device) {
  const DeviceGuard guard(device.index);
  return std::make_unique<TableImpl>(chunks, device);
}

void swap(void* parameter, DType parameter_dtype, void* average, DType average_dtype, int64_t count, Direction direction, Device device) {
  const DeviceGuard guard(device.index);
  if (count == 0) return;
  const auto stream = static_cast<cudaStream_t>(device.stream);
  auto* const a = static_cast<uint16_t*>(parameter);
  if (parameter_dtype == average_dtype) {
    with_dtype(parameter_dtype, [&]<class P>() {
      const int64_t words = count * static_cast<int64_t>(sizeof(P) / 2);
      swap_kernel<<<blocks_for(words), kThreads, 0, stream>>>(a, static_cast<uint16_t*>(average), words);
    });
  } else if (swaps_in_place(parameter_dtype, average_dtype)) {
    exchange_kernel<<<blocks_for(count), kThreads, 0, stream>>>(a, static_cast<uint32_t*>(average), count, direction);
  }
  check(cudaGetLastError(), "launch of swap");
}

void cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count, Device device) {
  const DeviceGuard guard(device.index);
  if (count == 0) return;
  const auto stream = static_cast<cudaStream_t>(device.stream);
  with_dtype(from_dtype, [&]<class From>() {
    with_dtype(to_dtype, [&]<class To>() {
      if constexpr (std::is_same_v<From, To>) {
        check(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(To), cudaMemcpyDeviceToDevice, stream), "copy");
      } else {
        cast_kernel<<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const From*>(from), static_cast<To*>(to), count);
      }
    });
  });
  check(cudaGetLastError(), "launch of cast");
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

namespace {

class EventCopy final : public Copy {
 public:
  EventCopy(void* to, const void* from, size_t bytes, Device device) : index_(device.index), event_(std::make_unique<Event>()) {
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

}  // namespace

std::unique_ptr<Copy> begin_copy(void* to, const void* from, size_t bytes, Device device) {
  const DeviceGuard guard(device.index);
  return std::make_unique<EventCopy>(to, from, bytes, device);
}

}  // namespace shardow::kernels::cuda
