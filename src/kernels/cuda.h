// The same kernels on CUDA devices, by CUDA's driver and by NVRTC, CUDA's compiler, as they are found when they are
// first needed (cuda_driver.h, cuda_nvrtc.h): nothing of CUDA is needed to build this.
//
// Everything is enqueued on the given stream; nothing waits except upload() and read_tally(). Functions throw
// kUnsupported without a device, kOutOfMemory where the device or pinned memory has none left, kInternal with the
// driver's message when a launch fails.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "kernels/cuda_work.h"
#include "kernels/kernels.h"

namespace shardow::kernels::cuda {

bool available() noexcept;       ///< a device answers
const char* why_not() noexcept;  ///< one sentence for messages where !available()

/// The chunks of one binding, uploaded once, with the step block and the tally beside them in device memory.
class Table {
 public:
  virtual ~Table() = default;
  /// One kernel launch for all chunks, and nothing else: the step is an argument of the kernel. Captured into a graph,
  /// it replays with the step of the latest set_step() in place of this one; with no averages in that step, before the
  /// first set_step(), or when the table is gone, it does nothing.
  virtual void update(const Step& step) = 0;
  /// Every average <- its parameter, rounded to nearest even: one launch. Not to be captured: kInvalidArgument.
  virtual void copy(int num_averages) = 0;
  /// For graph replays: those launched on the stream after this use the step. Not to be captured itself:
  /// kInvalidArgument.
  virtual void set_step(const Step& step) = 0;
  virtual Tally read_tally() = 0;  ///< waits; counts since the last call of read_tally()
  /// From here on the table's work goes to this stream, behind what it has on the last one; the host does not wait.
  virtual void set_stream(void* stream) = 0;
};

bool capturing(const Device& device);  ///< the stream is being captured into a graph
void finish(const Device& device);     ///< the host waits for all that the stream has to do

/// Averages of one dtype. Compiles and loads the kernels for the chunks' dtypes where the process has none yet, most of
/// a second; kUnsupported where there is no NVRTC that does.
std::unique_ptr<Table> upload(std::span<const Chunk> chunks, Device device);

/// Throws kUnsupported where upload() would, on any chunks.
void check_kernels(int index);

/// What NVRTC has done in this process.
struct CompileReport {
  std::string compiler, device;  ///< "NVRTC 12.9"; empty: nothing was compiled
  double seconds = 0;
};
CompileReport compile_report();

/// Exchanges parameters of one device with their averages there, `Pairs::kMost` at most, whose dtypes swap in place:
/// one launch.
void swap(std::span<const TensorView> parameters, std::span<const TensorView> averages, Direction direction);
void cast(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count, Device device);

/// Memory of the device, 256-byte aligned; `pinned`: of the host, which devices copy from and to without a copy in
/// between.
void* allocate(size_t bytes, int index, bool pinned = false);
void release(void* memory, int index, bool pinned = false) noexcept;

/// Bytes from there to the end of the device's allocation that they are in, which a copy must not leave; 0: unknown.
size_t rest_of_allocation(const void* memory, int index) noexcept;

/// Begins a copy, behind what device.stream has to do before. Between pinned and device memory it goes on by itself,
/// and where it fails, that is reported here or to the wait for an Event behind it (cuda_driver.h).
void copy(void* to, const void* from, size_t bytes, const Device& device);

}  // namespace shardow::kernels::cuda
