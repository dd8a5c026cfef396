// Backend: where averages live and are computed beside their weights, one per device; offload.h is of those that live
// elsewhere.
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

/// The views of one device, bound and ready to be updated.
class Backend {
 public:
  virtual ~Backend() = default;
  /// Makes what the first step that draws noise needs; later calls do nothing. Throws where memory is lacking.
  virtual void prepare_noise() {}
  /// One dispatch over every chunk. `by_runs`: the step draws noise, prepare_noise() came before. CPU: returns what it
  /// met; CUDA: enqueues, and returns nothing yet.
  virtual NonFiniteCount update(const kernels::Step& step, bool by_runs) = 0;
  /// Every average <- its parameter, converted, rounded to nearest even; each thread the part that it updates.
  virtual void copy_parameters() = 0;
  /// What updates met since the last call of this; CUDA waits for it. Always empty on a CPU, whose update() has told
  /// it.
  virtual NonFiniteCount read_count() { return {}; }
  /// Memory of the tables.
  virtual int64_t table_bytes() const noexcept = 0;

  // What only CUDA has; a CPU's work is done when its call returns.
  virtual void set_stream(int /*index*/, void* /*stream*/) {
  }  ///< of device `index`: what follows goes there, behind what came before
  virtual bool capturing() const { return false; }  ///< update() would be captured into a graph
  virtual void capture(const kernels::Step& /*step*/) {
  }  ///< launches that a replay repeats, with the step of the last prepare()
  /// Throws where prepare() of such a step could not be done; nothing of the step has begun.
  virtual void check_prepare(bool /*by_runs*/) {}
  /// In place of update() where the launch is a graph's, after check_prepare(). A step without averages, which kernels
  /// don't take, is for a replay that is to do nothing.
  virtual NonFiniteCount prepare(const kernels::Step& step, bool by_runs) {
    return step.num_averages > 0 ? update(step, by_runs) : NonFiniteCount{};
  }
};

/// How many threads are worth their wake for so many elements; `num_threads` 0: what the process is allowed.
int threads_for(int64_t elements, int num_threads);

/// `averages[k][i]` belongs to `parameters[i]`, all on `device`. Work on a CPU is done by `pool`, which outlives the
/// backend.
std::unique_ptr<Backend> make_backend(Device device, std::span<const TensorView> parameters,
                                      std::span<const std::vector<TensorView>> averages, base::ThreadPool& pool);

/// to <- from, converted, rounded to nearest even. One device, equal sizes.
void cast(const TensorView& from, const TensorView& to, base::ThreadPool& pool);

/// How many like this parameter and its average, on one device, swap() takes at once.
size_t most_swapped(const TensorView& parameter, const TensorView& average);

/// Exchanges parameters that kernels::swaps_in_place() with their averages, at most most_swapped() of them.
void swap(std::span<const TensorView> parameters, std::span<const TensorView> averages, kernels::Direction direction,
          base::ThreadPool& pool);

/// The host waits until a cast of the parameter has ended.
void finish(const TensorView& parameter);

/// The same of `count` elements in host memory. Allocate nothing.
void cast_on_host(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count,
                  base::ThreadPool& pool) noexcept;
void swap_on_host(std::byte* parameter, DType parameter_dtype, std::byte* average, DType average_dtype, int64_t count,
                  kernels::Direction direction, base::ThreadPool& pool) noexcept;

}  // namespace shardow::average
