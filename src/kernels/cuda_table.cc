// The host's side of the CUDA kernels: tables in device memory, one launch per update, errors.
//
// How a step reaches the kernel: an update() outside of a capture passes it by value, so there is nothing to copy and
// nothing to wait for. A captured update() passes the address of a step in device memory instead; set_step() writes
// that one through pinned memory, in stream order: after every earlier replay, before every later one. Pinned slots are
// used in turn, so that the host waits only when it is kSlots replays ahead.
//
// How streams follow one another: a table knows the stream that it used last; the first use of another one waits, on
// the device, for what the last one had to do. A capture can't wait for what is outside of it: who captures has
// synchronised before, as torch does.
#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"
#include "kernels/cuda_work.h"
#include "kernels/memory.h"
#include "shardow/error.h"
#include "tensor/dtype.h"

namespace shardow::kernels::cuda {
namespace {

template <class T>
T* array_in(const Memory& memory) {
  return reinterpret_cast<T*>(memory.data());
}

/// Elements per tile: enough tiles to give every warp of the device one, but none so small that its preparation shows.
/// Of several averages a tile has fewer elements, so that the warps end together.
uint32_t tile_elements(std::span<const Chunk> chunks, int multiprocessors) {
  constexpr int64_t kGroupSize = kGroup, kLeast = 2 * kGroupSize, kMost = 16 * kGroupSize, kWarpsEach = 32;
  int64_t total = 0, averages = 1;
  for (const Chunk& chunk : chunks) {
    total += chunk.count;
    averages =
        std::max<int64_t>(averages, std::ranges::count_if(chunk.averages, [](void* each) { return each != nullptr; }));
  }
  const int64_t share = std::min(total / (multiprocessors * kWarpsEach), kMost / averages) / kLeast * kLeast;
  return static_cast<uint32_t>(std::max(share, kLeast));
}

/// Eight tiles that follow one another, the warps of a block for the most part, take turns in one stretch: so the
/// device's memory is read and written in long pieces.
std::vector<Tile> make_tiles(std::span<const Chunk> chunks, uint32_t elements) {
  constexpr uint32_t kTurn = kWarps * kGroup;
  std::vector<Tile> tiles;
  const uint32_t shared = kWarps * elements;
  for (size_t c = 0; c < chunks.size(); ++c) {
    const auto chunk = static_cast<uint32_t>(c);
    int64_t begin = 0;
    for (; chunks[c].count - begin >= shared; begin += shared) {
      for (uint32_t at = 0; at < kTurn; at += kGroup) tiles.push_back({chunk, shared - at, kTurn, begin + at});
    }
    for (; begin < chunks[c].count; begin += elements)
      tiles.push_back(
          {chunk, static_cast<uint32_t>(std::min<int64_t>(elements, chunks[c].count - begin)), kGroup, begin});
  }
  return tiles;
}

const char* type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "float";
    case DType::kBF16: return "BF16";
    case DType::kF16: return "F16";
    default: return "double";
  }
}

/// "update_kernel<float, BF16, float>": the averages' type, and those that the parameters have; and the copy's.
std::vector<std::string> names_for(std::span<const Chunk> chunks) {
  const DType average = chunks.empty() ? DType::kF32 : chunks[0].average_dtype;
  std::string arguments = std::string("<") + type_of(average);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    const bool used =
        std::any_of(chunks.begin(), chunks.end(), [&](const Chunk& chunk) { return chunk.parameter_dtype == dtype; });
    if (used || (chunks.empty() && dtype == average)) arguments += std::string(", ") + type_of(dtype);
  }
  if (std::any_of(chunks.begin(), chunks.end(), [&](const Chunk& chunk) { return chunk.average_dtype != average; }))
    throw Error(Code::kUnsupported, "averages of several dtypes in one table");
  arguments += ">";
  return {"update_kernel" + arguments, "copy_kernel" + arguments};
}

template <class... Arguments>
void launch(void* kernel, unsigned blocks, const Device& device, const Arguments&... arguments) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  DeviceGuard(device.index)->launch(kernel, blocks, 1, 1, kThreads, 1, 1, 0, device.stream, addresses, nullptr);
}

void set_to_zero(void* memory, size_t bytes, const Device& device) {
  DeviceGuard(device.index)->set(memory, 0, bytes, device.stream);
}

class TableImpl final : public Table {
 public:
  TableImpl(std::span<const Chunk> chunks, Device device)
      : device_(device), kernels_(load_kernels(names_for(chunks), device.index)), done_(device.index) {
    const std::vector<Tile> tiles =
        make_tiles(chunks, tile_elements(chunks, used_device(device.index).multiprocessors));
    if (tiles.size() > 0xffffffffu) throw Error(Code::kUnsupported, "more than 2^32 tiles in one table");
    for (size_t i = 0; i < kSlots; ++i) written_.emplace_back(device.index);
    fill(chunks, tiles);
  }

  ~TableImpl() override {
    finish();
    if (captured_) kept_.abandon();
  }

  void update(const Step& step) override {
    if (work_.num_tiles == 0 || step.num_averages == 0) return;
    const bool captured = capturing(device_);
    const UpdateArguments* const kept = captured ? array_in<UpdateArguments>(kept_) : nullptr;
    captured_ = captured_ || captured;
    launch(kernels_[0], blocks(), device_, captured ? UpdateArguments{} : UpdateArguments{step, work_}, kept);
  }

  void copy(int num_averages) override {
    if (work_.num_tiles == 0) return;
    if (capturing(device_))
      throw Error(Code::kInvalidArgument,
                  "averages begin with their weights outside of a capture: a replay would begin them again");
    launch(kernels_[1], blocks(), device_, work_, num_averages);
  }

  void set_step(const Step& step) override {
    const size_t slot = next_slot_++ % kSlots;
    written_[slot].wait();
    UpdateArguments* const pinned = array_in<UpdateArguments>(pinned_) + slot;
    *pinned = {step, work_};
    cuda::copy(kept_.data(), pinned, sizeof(UpdateArguments), device_);
    written_[slot].record(device_.stream);
  }

  Tally read_tally() override {
    DeviceTally* const read = array_in<DeviceTally>(read_);
    cuda::copy(read, tally_.data(), sizeof(DeviceTally), device_);
    set_to_zero(tally_.data(), sizeof(DeviceTally), device_);
    done_.record(device_.stream);
    done_.wait();
    return {static_cast<int64_t>(read->non_finite),
            read->non_finite > 0 ? static_cast<int64_t>(0xffffffffu - read->last_chunk) : -1};
  }

  void set_stream(void* stream) override {
    if (stream == device_.stream) return;
    done_.order(stream, device_.stream);
    device_.stream = stream;
  }

 private:
  static constexpr size_t kSlots = 16;

  unsigned blocks() const { return (work_.num_tiles + kWarps - 1) / kWarps; }

  /// Waits for what the table has under way, so that its memory can be freed. A graph may be replayed when the table is
  /// gone: then it reads zeros and does nothing. What it reads is never freed. The zeros come after the replays before,
  /// unless the stream is captured at this moment; who captures has waited for updates, but maybe not for steps.
  void finish() noexcept {
    try {
      std::optional<Stream> aside;
      const StreamState state = state_of(device_);
      const Device& device = state == StreamState::kReady ? device_ : aside.emplace(device_.index).device();
      if (state == StreamState::kGone) DeviceGuard(device_.index)->synchronize_context();
      if (state == StreamState::kCaptured) {
        for (Event& written : written_) written.wait();
      }
      if (captured_) set_to_zero(kept_.data(), sizeof(UpdateArguments), device);
      cuda::finish(device);
    } catch (const Error&) {  // the device has failed: nothing is done or replayed any more
    }
  }

  /// Fills the device's memory on a private stream, so that nothing waits for what the device has to do for others.
  void fill(std::span<const Chunk> chunks, const std::vector<Tile>& tiles) {
    const Stream stream(device_.index);
    const auto put = [&](Memory& memory, const void* from, size_t bytes) {
      memory = Memory(bytes, stream.device());
      if (bytes > 0) cuda::copy(memory.data(), from, bytes, stream.device());
    };
    put(chunks_, chunks.data(), chunks.size_bytes());
    put(tiles_, tiles.data(), tiles.size() * sizeof(Tile));
    work_ = {array_in<Chunk>(chunks_), array_in<Tile>(tiles_), static_cast<uint32_t>(tiles.size()),
             array_in<DeviceTally>(tally_)};
    set_to_zero(tally_.data(), sizeof(DeviceTally), stream.device());
    set_to_zero(kept_.data(), sizeof(UpdateArguments), stream.device());
    cuda::finish(stream.device());
  }

  Device device_;
  const std::vector<void*> kernels_;  // of names_for()
  Work work_;                         // in chunks_, tiles_, tally_
  Memory chunks_, tiles_, tally_{sizeof(DeviceTally), device_}, kept_{sizeof(UpdateArguments), device_};
  Memory pinned_ = Memory::pinned(kSlots * sizeof(UpdateArguments), device_);
  Memory read_ = Memory::pinned(sizeof(DeviceTally), device_);
  std::deque<Event> written_;  // of the slots
  Event done_;                 // of what the host or another stream waits for
  size_t next_slot_ = 0;
  bool captured_ = false;
};

/// With enough threads for so many groups, or to fill any device; the kernels stride over the rest.
template <class... Arguments>
void launch_over(int64_t groups, const std::string& kernel, const Device& device, const Arguments&... arguments) {
  if (groups == 0) return;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>((groups + kWarps - 1) / kWarps, 1, 4096));
  launch(load_kernels({kernel}, device.index)[0], blocks, device, arguments...);
}

int64_t groups_of(int64_t count) {
  return (count + kGroup - 1) / kGroup;
}

}  // namespace

std::unique_ptr<Table> upload(std::span<const Chunk> chunks, Device device) {
  return std::make_unique<TableImpl>(chunks, device);
}

void swap(std::span<const TensorView> parameters, std::span<const TensorView> averages, Direction direction) {
  Pairs pairs{{}, static_cast<int>(parameters.size()), direction};
  int64_t groups = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool exchange = parameters[i].dtype != averages[i].dtype;
    const int64_t words = exchange ? 1 : byte_size(parameters[i].dtype, 1) / 2;
    pairs.pairs[i] = {static_cast<uint16_t*>(parameters[i].data), averages[i].data, words * parameters[i].region.size(),
                      exchange};
    groups += groups_of(pairs.pairs[i].count);
  }
  launch_over(groups, "swap_kernel", parameters[0].device, pairs);
}

void cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count, Device device) {
  if (count == 0) return;
  if (from_dtype == to_dtype) {
    copy(to, from, static_cast<size_t>(byte_size(from_dtype, count)), device);
  } else {
    launch_over(groups_of(count), std::string("cast_kernel<") + type_of(from_dtype) + ", " + type_of(to_dtype) + ">",
                device, from, to, count);
  }
}

}  // namespace shardow::kernels::cuda
