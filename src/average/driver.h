// What a face needs of an Average whose framework moves replicas' memory, frees weights as it likes and looks on
// without waiting: Python's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "average/counters.h"
#include "average/other_memory.h"
#include "shardow/average.h"

namespace shardow::average {

/// How far a swap has come: all that the way back needs to know, whatever interrupted it.
struct SwapState {
  size_t exchanged = 0;  ///< views of which this rank's part holds averages, or some of them, the first ones
  bool shared = false;   ///< parts that other replicas own may hold averages: the way back needs those replicas
};

struct Driver {
  static SwapState swap_state(const Average& ema) noexcept;

  /// Takes views that the caller needs no more, of which a million are 100 MB. `other` works on those that are kOther.
  static Average make(std::vector<TensorView> weights, std::vector<std::vector<TensorView>> averages,
                      AverageOptions options, std::shared_ptr<OtherMemory> other);

  /// swap_out() in steps, for callers who send replicas their parts themselves: share() before other replicas' memory
  /// is overwritten, take_back() for what this rank owns, and settle() when all of the weights are back. `weights`: as
  /// in swap_in(), with the same contents, where their addresses have changed. The last two do nothing where nothing is
  /// swapped in.
  static void share(Average& ema);
  static void take_back(Average& ema, std::span<const TensorView> weights = {});
  static void settle(Average& ema);

  /// From now on the end of `ema` leaves an open swap where it stands: the weights' memory keeps the averages, and is
  /// not touched.
  static void abandon_swap(Average& ema) noexcept;

  /// reset(), at step 0, with nothing counted or noted. Options stay.
  static void restart(Average& ema);

  /// At once, without waiting for an update under way.
  static Counters counters(const Average& ema) noexcept;

  /// Training samples seen at the next step, where each one since the last that changed the averages has `batch` of
  /// them.
  static double samples_by(const Average& ema, double batch) noexcept;
};

/// Bytes from one average's first byte to the next one's, for averages of `bytes` each (a multiple of 64) on a CPU.
///
/// Streams whose addresses agree modulo 64 MiB, to within about 8 MiB, were measured to run at a third of the speed of
/// others (docs/architecture.md), so large averages are spread evenly over that period. What lies between them is never
/// touched: address space, not memory.
int64_t arena_stride(int64_t bytes, int num_averages);

}  // namespace shardow::average
