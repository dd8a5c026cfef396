// Backend: averages in the memory of their weights' device, one backend for each device. offload.h has averages in
// other memory.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "average/host_table.h"
#include "base/threads.h"
#include "kernels/cuda_work.h"
#include "kernels/kernels.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

/// The averages of one device, bound to its parameters and ready for updates.
class Backend {
 public:
  virtual ~Backend() = default;
  /// Prepares for steps that draw noise; later calls do nothing. Throws where memory is lacking.
  virtual void prepare_noise() {}
  /// Updates every chunk in one dispatch. `by_runs`: the step draws noise, prepare_noise() came before. On a CPU it
  /// returns the NaN and Inf that it met; CUDA only enqueues the work and returns a count of zero.
  virtual NonFiniteCount update(const kernels::Step& step, bool by_runs) = 0;
  /// Copies the parameters into every average, converted, rounded to nearest even. Each thread writes the part that it
  /// updates.
  virtual void copy_parameters() = 0;
  /// Returns the NaN and Inf that updates met since the last call; CUDA waits for them. A CPU's count is always zero,
  /// since its update() has returned it.
  virtual NonFiniteCount read_count() { return {}; }
  /// Returns the memory of the tables.
  virtual int64_t table_bytes() const noexcept = 0;

  // Only CUDA needs the rest; a CPU's work is done when its call returns.
  virtual void set_stream(int /*index*/, void* /*stream*/) {
  }  ///< of device `index`: later work goes to this stream, after all earlier work
  virtual bool capturing() const { return false; }  ///< update() would be captured into a graph
  virtual void capture(const kernels::Step& /*step*/) {
  }  ///< captures launches that a replay repeats, with the step of the last prepare()
  /// Throws where prepare() of such a step would fail. Nothing of the step has begun.
  virtual void check_prepare(bool /*by_runs*/) {}
  /// Replaces update() where a graph launches, after check_prepare(). A step without averages, which kernels don't
  /// take, makes the replay do nothing.
  virtual NonFiniteCount prepare(const kernels::Step& step, bool by_runs) {
    return step.num_averages > 0 ? update(step, by_runs) : NonFiniteCount{};
  }
};

/// Returns how many threads to wake for `elements`; `num_threads` 0: as many as the process is allowed.
int threads_for(int64_t elements, int num_threads);

/// Makes the backend of `device`, where all views are; `averages[k][i]` belongs to `parameters[i]`. `pool` does the
/// work on a CPU, and outlives the backend.
std::unique_ptr<Backend> make_backend(Device device, std::span<const TensorView> parameters,
                                      std::span<const std::vector<TensorView>> averages, base::ThreadPool& pool);

/// Copies `from` to `to`, converted, rounded to nearest even. Both are on one device, and of equal size.
void cast(const TensorView& from, const TensorView& to, base::ThreadPool& pool);

/// Returns how many parameters like this one, with averages like this one, a call of swap() takes on one device.
size_t most_swapped(const TensorView& parameter, const TensorView& average);

/// Exchanges parameters that kernels::swaps_in_place() with their averages, at most most_swapped() of them.
void swap(std::span<const TensorView> parameters, std::span<const TensorView> averages, kernels::Direction direction,
          base::ThreadPool& pool);

/// Waits, on the host, until a cast of the parameter has ended.
void finish(const TensorView& parameter);

/// Cast and swap `count` elements in host memory. They allocate nothing.
void cast_on_host(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count,
                  base::ThreadPool& pool) noexcept;
void swap_on_host(std::byte* parameter, DType parameter_dtype, std::byte* average, DType average_dtype, int64_t count,
                  kernels::Direction direction, base::ThreadPool& pool) noexcept;

}  // namespace shardow::average
