// RingSwap exchanges weights on a device with averages on the host, through the ring, with no second copy on either
// side where dtypes allow that.
//
// Blocks of weights come to a slot of the ring, are exchanged there with their averages, and go back; while one is
// exchanged, the one before goes back and the next one comes. Invariants between two calls:
//   blocks [0, done_)                   hold averages in the device's memory
//   blocks [done_, done_ + unwritten_)  have their weights in their slots, and their averages on the host. A copy
//                                       failed, so what they hold in the device's memory is not known
//   all other blocks                    hold weights
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "average/ring.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

/// For tests: called between two steps wherever it is set; what it throws ends the swap there, as a failing device or
/// allocation would. Not for two threads.
inline void (*swap_seam)() = nullptr;

class RingSwap {
 public:
  /// Parallel: the weights on a device, their averages on the host, and memory on the host for weights that do not swap
  /// in place.
  struct Tensors {
    std::span<const TensorView> weights, averages;
    std::span<const kernels::Memory> kept;
  };

  /// Plans the swap of weights[first] to weights[end - 1], all on the ring's device.
  RingSwap(std::shared_ptr<Ring> ring, std::span<const TensorView> weights, size_t first, size_t end);

  /// Puts the averages into the weights' memory, and waits until they are there. Where it throws, out() undoes it.
  void in(const Tensors& tensors, base::ThreadPool& pool);
  /// Puts the weights back, from whatever point; where it throws it can be called again.
  void out(const Tensors& tensors, base::ThreadPool& pool);

 private:
  struct Piece {
    size_t view;
    int64_t begin, count;  // elements
    size_t at;             // bytes into the slot
  };
  struct Block {
    size_t first, end;  // pieces
  };
  class Pass;

  std::shared_ptr<Ring> ring_;
  size_t first_;
  std::vector<Piece> pieces_;
  std::vector<Block> blocks_;
  size_t done_ = 0, unwritten_ = 0;
};

}  // namespace shardow::average
