// The inside of Average, shared by its source files: average.cc (face, state), binding.cc (memory), update.cc,
// background.cc (updates that go on while the caller does), swap.cc, streams.cc.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "average/backend.h"
#include "average/counters.h"
#include "average/offload.h"
#include "average/one_user.h"
#include "average/other_memory.h"
#include "average/swap.h"
#include "base/worker.h"
#include "kernels/memory.h"
#include "shardow/average.h"
#include "shardow/error.h"
#include "shardow/group.h"

namespace shardow {

/// Invariants: parts and averages[k] are parallel and have equal regions; undivided is parallel to parts, and empty
/// without replicas.
struct Average::Impl {
  mutable average::OneUser user;
  AverageOptions options;
  average::Counters counters;
  std::vector<TensorView> parts;                       // what this rank averages of the parameters as bound
  std::vector<TensorView> undivided;                   // the parameters, where replicas divide them
  std::vector<std::vector<TensorView>> averages;       // [k][parameter]
  kernels::Memory memory;                              // of the averages, where they are our own
  std::shared_ptr<average::OtherMemory> other_memory;  // where kernels reach neither parameters nor averages
  std::unique_ptr<base::ThreadPool> pool;              // of all work on a CPU but updates in the background; never null

  /// What averages, of the views as bound: those whose averages lie beside them, and those whose averages are on the
  /// host.
  struct Bound {
    std::vector<std::unique_ptr<average::Backend>> backends;
    std::vector<std::unique_ptr<average::Offload>> offloads;
  };
  Bound bound;

  std::optional<average::SwapRecord> swap;
  bool abandoned = false;  // the end leaves a swap where it stands: the weights' memory is not touched

  std::optional<Error> torn;  // why the averages are those of no update; until reset()

  struct Met {
    int64_t step, elements;
    size_t part;  // the first with a NaN or Inf; parts.size(): not known
  };
  std::optional<Met> met;  // not forgotten yet

  int64_t elements = 0;  // of one average
  int64_t bytes_per_update = 0;
  int64_t offload_bytes_before = 0;  // by what was bound before
  double seconds = 0;
  double hidden_seconds = 0, waited_seconds = 0;

  Impl(std::vector<TensorView> parameters, AverageOptions chosen, std::shared_ptr<average::OtherMemory> others);
  ~Impl();  ///< takes the weights back where a swap is open

  /// First in each call of the face that reads or writes what another call may write.
  [[nodiscard]] average::OneUser::Use use(const char* call) const { return {user, call}; }

  [[nodiscard]] average::OneUser::Look look() const { return average::OneUser::Look(user); }

  std::span<const TensorView> whole() const {
    return options.replicas != nullptr ? undivided : parts;
  }  ///< parameters as bound

  void allocate();
  void bind(std::span<const TensorView> parameters);
  Bound make_bound(std::span<const TensorView> views);
  std::shared_ptr<average::Ring> ring_of(int index) const;
  void reset();
  void copy_parameters();
  void read_counts();
  void set_state(const average::State& state, OptionsFrom from);
  enum class Launch { kNow, kByReplay };
  UpdateReport update(std::optional<int64_t> step, double samples, std::span<const Factors> given = {},
                      Launch launch = Launch::kNow);
  Progress progress_at(int64_t step, double samples) const noexcept;  ///< of a step that comes next, if it is averaged
  void wait();
  void finish_reading();
  void set_stream(int index, void* stream);
  void follow_streams(std::span<const TensorView> views);
  std::vector<TensorView> divide(std::span<const TensorView> views) const;
  void swap_in(std::span<const TensorView> weights, size_t k);
  void swap_out();
  void restart();  ///< reset(), at step 0, with nothing counted or noted; options stay

  // A swap in steps, for callers whose memory moves and whose ranks say why they leave.
  average::SwapRecord prepare_swap(std::span<const TensorView> weights, size_t k);
  void enter_swap(average::SwapRecord prepared, average::WeightsMemory& model, const average::SwapRanks& ranks);
  void leave_swap(const average::Leaving& leaving, average::WeightsMemory& model, const average::SwapRanks& ranks);

 private:
  class OwnMemory;
  average::SwapRanks swap_ranks() const;
  UpdateReport begin_update(std::optional<int64_t> step, double samples, std::span<const Factors> given, Launch launch);
  int64_t next_step(std::optional<int64_t> step) const;
  bool copies_at(int64_t step) const;
  void apply(UpdateReport& report, int64_t step, double samples, std::span<const Factors> given, Launch launch);
  bool capturing() const;
  void capture();
  [[noreturn]] void refuse_graph(const char* what) const;
  kernels::Step plan_step(int64_t step, double samples, std::span<const Factors> given, Factors* first) const;
  kernels::Step::One plan_one(const Factors& factors) const;
  bool draws_by_runs(const kernels::Step& step) const;
  average::NonFiniteCount dispatch(const kernels::Step& step);
  average::NonFiniteCount prepare(const kernels::Step& step, bool by_runs);
  void make_background(bool offloads);
  void work();
  [[noreturn]] void stopped(const Error& cause);
  void refuse_non_finite(const average::NonFiniteCount& count, int64_t step) const;
  void hold(const average::NonFiniteCount& count, int64_t step);
  void add(average::NonFiniteCount& count, const average::NonFiniteCount& more) const;
  size_t part_of(const void* element) const;
  average::Ends leave_alone(const average::Leaving& leaving, average::WeightsMemory& model,
                            const average::SwapRanks& ranks);
  average::Ends leave_together(const average::Leaving& leaving, average::WeightsMemory& model,
                               const average::SwapRanks& ranks);
  void put_back(std::span<const TensorView> places, average::WeightsMemory& model);
  void take_back(std::span<const TensorView> places, average::WeightsMemory& model);
  void finish(average::WeightsMemory& model);
  [[noreturn]] void stay(const average::Leaving& leaving, const Error& error);
  void exchange_in();
  void exchange_out();
  void exchange(size_t first, size_t end, kernels::Direction direction);
  bool swap_together(size_t i, size_t other) const;
  average::RingSwap::Tensors through_ring() const;

  // An update in the background, from begin_background() to the wait() that ends it. While the worker is busy it writes
  // count, seconds and changed, and averages are its own.
  struct UnderWay {
    kernels::Step step;
    average::Counters before;  // those of the last whole update
    average::NonFiniteCount count = {};
    double seconds = 0, waited = 0;
    bool changed = false;   // some averages are those of this update
    bool released = false;  // finish_reading() let the weights change
    bool stopped = false;   // it failed halfway, and the next wait() takes it up
  };
  std::optional<UnderWay> under_way_;
  int64_t unreported_ = 0;  // NaN and Inf that updates in the background met, until a report tells of them
  std::unique_ptr<base::ThreadPool> background_pool_;  // null where nothing is done in the background, as the next one
  std::unique_ptr<base::Worker> worker_;               // the last member: ends first
};

/// The inside of an Average, for faces whose framework moves replicas' memory, frees weights as it likes and looks on
/// without waiting: Python's.
struct average::Inside {
  static Average::Impl& of(const Average& average) noexcept { return *average.impl_; }

  /// Takes views that the caller needs no more, of which a million are 100 MB. `other` works on those that are kOther.
  static Average make(std::vector<TensorView> weights, std::vector<std::vector<TensorView>> averages,
                      AverageOptions options, std::shared_ptr<OtherMemory> other) {
    return {std::move(weights), std::move(averages), std::move(options), std::move(other)};
  }
};

}  // namespace shardow
