// The host's side of the CUDA kernels: tables in device memory, one launch per update, errors.
//
// How a step reaches the kernel: an update() outside of a capture passes it by value, so there is nothing to copy and
// nothing to wait for. A captured update() passes the address of a step in device memory instead; set_step() writes
// that one through pinned memory, in stream order: after every earlier replay, before every later one. Pinned slots are
// used in turn, so that the host waits only when it is kSlots replays ahead.
//
// How streams follow one another: a table knows the stream that it used last; the first use of another one waits, on
// the device, for what the last one had to do. A capture can't wait for what is outside of it: whoever captures has
// synchronised before, as torch does.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cuda.h"
#include "kernels/cuda_calls.h"
#include "kernels/cuda_move.cuh"
#include "kernels/cuda_update.cuh"
#include "kernels/memory.h"
#include "kernels/row.h"
#include "shardow/error.h"

namespace shardow::kernels::cuda {
namespace {

/// Memory as an array of T.
template <class T>
class Array {
 public:
  explicit Array(Memory memory) : memory_(std::move(memory)) {}
  T* get() const { return reinterpret_cast<T*>(memory_.data()); }

 private:
  Memory memory_;
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
      tiles.push_back({static_cast<uint32_t>(c),
                       static_cast<uint32_t>(std::min<int64_t>(elements, chunks[c].count - begin)), begin});
    }
  }
  return tiles;
}

using Kernel = void (*)(Work, Step, const Step*);

/// The kernel for a table: of one pair of dtypes for the common ones, else one that looks at each chunk.
Kernel kernel_for(std::span<const Chunk> chunks) {
  const auto all = [&](auto&& property) {
    return std::all_of(chunks.begin(), chunks.end(),
                       [&](const Chunk& chunk) { return property(chunk) == property(chunks[0]); });
  };
  if (chunks.empty() || !all([](const Chunk& chunk) { return chunk.average_dtype; }))
    return update_kernel<Mixed, Mixed>;
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

/// Not in the language's own `<<<>>>`, so that a compiler of plain C++ reads this file too (tests/cuda/emulated.cc).
template <class... Parameters, class... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), unsigned blocks, void* stream,
            const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, arguments...), what);
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
    resources_ = std::make_unique<Resources>(Device{Device::Kind::kCuda, device.index}, chunks.size(), tiles.size());
    check(cudaMemcpy(resources_->chunks.get(), chunks.data(), chunks.size_bytes(), cudaMemcpyHostToDevice),
          "copy of the chunks");
    check(cudaMemcpy(resources_->tiles.get(), tiles.data(), tiles.size() * sizeof(Tile), cudaMemcpyHostToDevice),
          "copy of the tiles");
    check(cudaMemset(resources_->tally.get(), 0, sizeof(DeviceTally)), "reset of the tally");
    check(cudaMemset(resources_->step.get(), 0, sizeof(Step)), "reset of the step");
    check(cudaDeviceSynchronize(), "upload");  // before anything on a stream that does not wait for the default one
  }

  ~TableImpl() override {
    const DeviceGuard guard(device_.index, std::nothrow);
    resources_.reset();
  }

  void update(const Step& step) override {
    if (num_tiles_ == 0 || step.num_averages == 0) return;
    const DeviceGuard guard(device_.index);
    const Work work{resources_->chunks.get(), resources_->tiles.get(), num_tiles_, resources_->tally.get()};
    const unsigned blocks = (num_tiles_ + kWarps - 1) / kWarps;
    const Step* const latest = capturing(device_) ? resources_->step.get() : nullptr;
    launch("launch of update", kernel_, blocks, device_.stream, work, step, latest);
  }

  void set_step(const Step& step) override {
    const DeviceGuard guard(device_.index);
    if (capturing(device_))
      throw Error(Code::kInvalidArgument,
                  "set_step() belongs before a replay, not into the capture: it would be replayed with it");
    const size_t slot = next_slot_++ % kSlots;
    Event& written = resources_->written[slot];
    written.wait();
    Step* const pinned = resources_->pinned.get() + slot;
    std::memcpy(pinned, &step, sizeof(Step));
    check(cudaMemcpyAsync(resources_->step.get(), pinned, sizeof(Step), cudaMemcpyHostToDevice, stream()),
          "copy of the step");
    written.record(stream());
  }

  Tally read_tally() override {
    const DeviceGuard guard(device_.index);
    DeviceTally* const read = resources_->read.get();
    check(cudaMemcpyAsync(read, resources_->tally.get(), sizeof(DeviceTally), cudaMemcpyDeviceToHost, stream()),
          "copy of the tally");
    check(cudaMemsetAsync(resources_->tally.get(), 0, sizeof(DeviceTally), stream()), "reset of the tally");
    resources_->done.record(stream());
    resources_->done.wait();
    return {static_cast<int64_t>(read->non_finite),
            read->non_finite > 0 ? static_cast<int64_t>(0xffffffffu - read->last_chunk) : -1};
  }

  void set_stream(void* stream) override {
    if (stream == device_.stream) return;
    const DeviceGuard guard(device_.index);
    Device next = device_;
    next.stream = stream;
    if (!capturing(device_) && !capturing(next)) {
      resources_->done.record(static_cast<cudaStream_t>(device_.stream));
      resources_->done.wait_on(static_cast<cudaStream_t>(stream));
    }
    device_ = next;
  }

 private:
  static constexpr size_t kSlots = 16;

  struct Resources {
    Resources(const Device& device, size_t num_chunks, size_t num_tiles)
        : chunks(Memory(std::max<size_t>(num_chunks, 1) * sizeof(Chunk), device)),
          tiles(Memory(std::max<size_t>(num_tiles, 1) * sizeof(Tile), device)),
          tally(Memory(sizeof(DeviceTally), device)),
          step(Memory(sizeof(Step), device)),
          pinned(Memory::pinned(kSlots * sizeof(Step), device)),
          read(Memory::pinned(sizeof(DeviceTally), device)),
          written(kSlots) {}

    Array<Chunk> chunks;
    Array<Tile> tiles;
    Array<DeviceTally> tally;
    Array<Step> step;
    Array<Step> pinned;
    Array<DeviceTally> read;
    std::vector<Event> written;
    Event done;  // of what the host or another stream waits for
  };

  cudaStream_t stream() const { return static_cast<cudaStream_t>(device_.stream); }

  Device device_;
  Kernel kernel_;
  uint32_t num_tiles_;
  std::unique_ptr<Resources> resources_;
  size_t next_slot_ = 0;
};

/// Enough threads to fill any device; the kernels stride over the rest.
unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::clamp<int64_t>((count + kThreads * kPerLane - 1) / (kThreads * kPerLane), 1, 4096));
}

}  // namespace

std::unique_ptr<Table> upload(std::span<const Chunk> chunks, Device device) {
  const DeviceGuard guard(device.index);
  return std::make_unique<TableImpl>(chunks, device);
}

void swap(void* parameter, DType parameter_dtype, void* average, DType average_dtype, int64_t count,
          Direction direction, Device device) {
  const DeviceGuard guard(device.index);
  if (count == 0) return;
  auto* const a = static_cast<uint16_t*>(parameter);
  if (parameter_dtype == average_dtype) {
    with_dtype(parameter_dtype, [&]<class P>() {
      const int64_t words = count * static_cast<int64_t>(sizeof(P) / 2);
      launch("launch of swap", &swap_kernel, blocks_for(words), device.stream, a, static_cast<uint16_t*>(average),
             words);
    });
  } else if (swaps_in_place(parameter_dtype, average_dtype)) {
    launch("launch of swap", &exchange_kernel, blocks_for(count), device.stream, a, static_cast<uint32_t*>(average),
           count, direction);
  }
}

void cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count, Device device) {
  const DeviceGuard guard(device.index);
  if (count == 0) return;
  const auto stream = static_cast<cudaStream_t>(device.stream);
  with_dtype(from_dtype, [&]<class From>() {
    with_dtype(to_dtype, [&]<class To>() {
      if constexpr (std::is_same_v<From, To>) {
        check(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(To), cudaMemcpyDeviceToDevice, stream),
              "copy");
      } else {
        launch("launch of cast", &cast_kernel<From, To>, blocks_for(count), device.stream,
               static_cast<const From*>(from), static_cast<To*>(to), count);
      }
    });
  });
}

}  // namespace shardow::kernels::cuda
