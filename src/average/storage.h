// Storage: the memory that an Average works on (this rank's parts of the parameters, and the averages), what averages
// it on each device, and the CUDA streams that this work follows.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "average/backend.h"
#include "average/offload.h"
#include "average/other_memory.h"
#include "base/threads.h"
#include "kernels/memory.h"
#include "shardow/average.h"

namespace shardow::average {

/// Invariants: parts and averages[k] are parallel and have equal regions; undivided is parallel to parts, and empty
/// without replicas.
struct Storage {
  /// Refuses parameters that can't be averaged. `chosen` outlives this; its options that decide memory don't change.
  Storage(std::vector<TensorView> parameters, const AverageOptions& chosen, std::shared_ptr<OtherMemory> others);

  const AverageOptions& options;
  std::vector<TensorView> parts;                  // this rank's parts of the parameters as bound
  std::vector<TensorView> undivided;              // the parameters, where replicas divide them
  std::vector<std::vector<TensorView>> averages;  // [k][parameter]
  kernels::Memory arena;                          // of the averages, where the engine allocates them
  std::shared_ptr<OtherMemory> other;             // does the work where kernels reach neither parameters nor averages
  int64_t elements = 0;                           // of one average
  int64_t bytes_per_update = 0;
  std::unique_ptr<base::ThreadPool> pool;             // for all work on a CPU but updates in the background; never null
  std::unique_ptr<base::ThreadPool> background_pool;  // null without work in the background

  /// Averagers of the views as bound: backends where averages lie beside their parameters, offloads where averages are
  /// on the host.
  struct Bound {
    std::vector<std::unique_ptr<Backend>> backends;
    std::vector<std::unique_ptr<Offload>> offloads;
  };
  Bound bound;

  void take(std::vector<std::vector<TensorView>> views);  ///< the averages' memory; once
  void allocate();                                        ///< an arena for them; once
  /// Binds the same parameters at other addresses. All that can fail is made first; then everything changes at once.
  void bind(std::span<const TensorView> parameters);
  void copy_parameters();  ///< into every average

  std::span<const TensorView> whole() const { return options.replicas != nullptr ? undivided : parts; }  ///< as bound
  std::vector<TensorView> divide(std::span<const TensorView> views) const;  ///< the parts that this rank averages
  std::shared_ptr<Ring> ring_of(int index) const;
  bool works_in_background() const noexcept { return background_pool != nullptr; }
  int64_t offload_bytes() const noexcept;  ///< copied to the host by updates
  int64_t table_bytes() const noexcept;

  // Casts and swaps read a device's stream from the views, tables keep their own; the first use of a stream waits for
  // the last one on the device.
  void set_stream(int index, void* stream);
  bool capturing() const;  ///< an update() would be captured into a graph

 private:
  Bound make_bound(std::span<const TensorView> views);

  int64_t offload_bytes_before_ = 0;  // of earlier bindings
};

/// Gives the views of a CUDA device its stream.
void follow(std::vector<TensorView>& views, int index, void* stream);

}  // namespace shardow::average
