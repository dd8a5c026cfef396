// Swap puts the averages into the weights' memory, and the weights back: one transaction, for C++ and Python. Numbered
// steps are those of swap.cc.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "average/clock.h"
#include "average/concurrent_use_check.h"
#include "average/replicas.h"
#include "average/ring_swap.h"
#include "average/storage.h"
#include "average/updater.h"
#include "kernels/memory.h"
#include "shardow/group.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

/// Implemented by the owner of the weights' memory: Python, or the caller of C++, whose views stay where they are.
class WeightsMemory {
 public:
  virtual ~WeightsMemory() = default;

  /// Returns where the weights lie before the way back; empty: where they were swapped. Allocates all memory that
  /// exchange() needs. With `strict` it throws where a weight has no place any more; else it leaves such weights out.
  virtual std::vector<TensorView> places(bool strict) = 0;

  /// Sends the parts that each replica owns to all; collective among replicas. Calls `writes` before it overwrites
  /// parts that others own.
  virtual void exchange(const std::function<void()>& writes, Deadline deadline) = 0;

  virtual void scatter() {}  ///< after own parts were written: copies those that the model has in another order
  virtual void written() {}  ///< after all parts were written
};

/// The ranks of a swap. `divided`: replicas own parts of each other's weights.
struct SwapRanks {
  Group* group = nullptr;  ///< null: this rank alone
  bool divided = false;
  std::chrono::milliseconds timeout{0};
  std::string whose = {};  ///< behind the names of calls
};

/// How a rank leaves a swap.
struct Leaving {
  std::string call;
  std::string error = {};  ///< what ended its block; empty: nothing
  bool enters = false;     ///< it failed on the way in
  bool restores = false;   ///< restore(): without replicas no other rank learns of it
  bool strict = true;
};

/// How all ranks leave a swap.
struct Ends {
  bool shared = false, refused = false;  ///< a rank needs parts that others own; can't put its weights back
  std::string failures = {};             ///< errors of the ranks that failed; of those that refused alone, if any did
};

/// Weights that are exchanged in one call: weights[first] to weights[end - 1] of a record.
struct SwapStep {
  size_t first, end;
  std::unique_ptr<RingSwap> ring;  // of weights on a device whose averages are on the host
};

/// The whole state of a swap, from its first exchange to its end. Invariant: weights of the first `exchanged` steps
/// hold averages, and their values lie in the average's memory or in `kept`; the others hold weights. A step through a
/// ring is exchanged as far as its RingSwap says.
struct SwapRecord {
  size_t k;                           // which averages are in the weights' memory
  std::vector<TensorView> weights;    // the weights' memory: this rank's parts of it
  std::vector<kernels::Memory> kept;  // parallel to weights: those whose dtype does not swap in place, else empty
  std::vector<SwapStep> steps = {};   // of all weights, in order
  std::unique_ptr<ReplicaExchange> exchange = {};  // of AverageOptions::replicas
  size_t exchanged = 0;
  bool waited = false;   // this rank waited in vain for parts that others own
  bool entered = false;  // replicas: all have exchanged their own parts
  bool shared = false;   // parts that other replicas own may hold averages: the way back needs those replicas
  std::string why = {};  // why it is still open though it was left
};

/// Makes the swaps of one Average. Its state is the record of the open swap.
class Swap {
 public:
  /// Keeps references: all arguments outlive this.
  Swap(ConcurrentUseCheck& user, const Clock& clock, Storage& storage, Updater& updater)
      : user_(user), clock_(clock), storage_(storage), updater_(updater) {}
  ~Swap();  ///< takes the weights back where a swap is open
  Swap(const Swap&) = delete;
  Swap& operator=(const Swap&) = delete;

  const std::optional<SwapRecord>& record() const noexcept { return record_; }
  /// Throws while a swap is open; `what` begins the message.
  void refuse(const char* what) const;
  void abandon() noexcept { abandoned_ = true; }  ///< the destructor leaves an open swap as it is
  void set_stream(int index, void* stream);

  // Swaps of weights that stay where they are, with AverageOptions::replicas.
  void in(std::span<const TensorView> weights, size_t k);
  void out();

  // Swaps in steps, for callers whose memory moves and whose ranks report why they leave.
  SwapRecord prepare(std::span<const TensorView> weights, size_t k) const;
  void enter(SwapRecord prepared, WeightsMemory& model, const SwapRanks& ranks);
  void leave(const Leaving& leaving, WeightsMemory& model, const SwapRanks& ranks);

 private:
  class OwnMemory;

  SwapRanks own_ranks() const;
  Ends leave_alone(const Leaving& leaving, WeightsMemory& model, const SwapRanks& ranks);
  Ends leave_together(const Leaving& leaving, WeightsMemory& model, const SwapRanks& ranks);
  void put_back(std::span<const TensorView> places, WeightsMemory& model);
  void take_back(std::span<const TensorView> places, WeightsMemory& model);
  void finish(WeightsMemory& model);
  [[noreturn]] void stay(const Leaving& leaving, const Error& error);
  void exchange_in();
  void exchange_out();
  void exchange(const SwapStep& step, kernels::Direction direction);
  RingSwap::Tensors through_ring() const;

  ConcurrentUseCheck& user_;
  const Clock& clock_;
  Storage& storage_;
  Updater& updater_;
  std::optional<SwapRecord> record_;
  bool abandoned_ = false;
};

}  // namespace shardow::average
