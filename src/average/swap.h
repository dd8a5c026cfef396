// The averages in the weights' memory, and the weights back: one transaction, for C++ and Python. Its numbered steps
// are those of swap.cc.
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

/// The memory of the weights, by its owner: Python, or the caller of C++, whose views stay where they are.
class WeightsMemory {
 public:
  virtual ~WeightsMemory() = default;

  /// Before the way back: where the weights lie by now; empty: where they were swapped. Takes all memory that
  /// exchange() needs. Throws where a weight has no place any more; not so `strict`, such are left out.
  virtual std::vector<TensorView> places(bool strict) = 0;

  /// Collective among replicas: what each of them owns goes to all. Calls `writes` before it overwrites what others
  /// own.
  virtual void exchange(const std::function<void()>& writes, Deadline deadline) = 0;

  virtual void scatter() {}  ///< own parts were written: copies those that the model has in another order
  virtual void written() {}  ///< all were written
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

/// How all of them leave it.
struct Ends {
  bool shared = false, refused = false;  ///< anybody needs parts that others own; can't put its weights back
  std::string failures = {};             ///< who left with what: why the others don't put theirs back, if any refused
};

/// Weights that are exchanged in one call: weights[first] to weights[end - 1] of a record.
struct SwapStep {
  size_t first, end;
  std::unique_ptr<RingSwap> ring;  // of weights on a device whose averages are on the host
};

/// A swap from its first exchange to its end: all that is known of it. Invariant: the weights of steps[0] to
/// steps[exchanged - 1] hold averages, and what was there lies in the average's memory or in `kept`; the others hold
/// weights. What goes through a ring is exchanged as far as its RingSwap says.
struct SwapRecord {
  size_t k;                           // which averages are in the weights' memory
  std::vector<TensorView> weights;    // the weights' memory: this rank's parts of it
  std::vector<kernels::Memory> kept;  // parallel to weights: those whose dtype does not swap in place, else empty
  std::vector<SwapStep> steps = {};   // of all weights, in order
  std::unique_ptr<ReplicaExchange> exchange = {};  // of AverageOptions::replicas
  size_t exchanged = 0;
  bool waited = false;   // in vain, for parts that others own
  bool entered = false;  // replicas: all have exchanged their own parts
  bool shared = false;   // parts that other replicas own may hold averages: the way back needs those replicas
  std::string why = {};  // it is still open though it was left
};

/// Swaps of one Average. Its state is the record of the swap that is open.
class Swap {
 public:
  /// All of them outlive this.
  Swap(ConcurrentUseCheck& user, const Clock& clock, Storage& storage, Updater& updater)
      : user_(user), clock_(clock), storage_(storage), updater_(updater) {}
  ~Swap();  ///< takes the weights back where a swap is open
  Swap(const Swap&) = delete;
  Swap& operator=(const Swap&) = delete;

  const std::optional<SwapRecord>& record() const noexcept { return record_; }
  /// Throws while a swap is open, by the end of the message what is impossible then.
  void refuse(const char* what) const;
  void abandon() noexcept { abandoned_ = true; }  ///< the end leaves a swap where it stands
  void set_stream(int index, void* stream);

  // Of weights that stay where they are, with AverageOptions::replicas.
  void in(std::span<const TensorView> weights, size_t k);
  void out();

  // In steps, for callers whose memory moves and whose ranks say why they leave.
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
