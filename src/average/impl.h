// The inside of Average, shared by its source files: average.cc (face, state), binding.cc (memory), update.cc, swap.cc, streams.cc.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "average/backend.h"
#include "average/counters.h"
#include "base/worker.h"
#include "kernels/memory.h"
#include "shardow/average.h"

namespace shardow {

/// Invariants: parts and averages[k] are parallel and have equal regions; whole is parallel to parts, and equal to it without replicas.
struct Average::Impl {
  AverageOptions options;
  average::Counters counters;
  std::vector<TensorView> whole;                  // parameters as bound
  std::vector<TensorView> parts;                  // what this rank averages of them
  std::vector<std::vector<TensorView>> averages;  // [k][parameter]
  kernels::Memory memory;                         // of the averages, where they are our own
  std::unique_ptr<base::ThreadPool> pool;         // of all work on a CPU but overlapped updates; never null
  std::vector<std::unique_ptr<average::Backend>> backends;

  /// A swap from its first exchange to its end. Invariant: the parts of weights[0] to weights[exchanged - 1] hold averages, and what was
  /// there lies in the average's memory or in `kept`; the others hold weights.
  struct Swap {
    size_t k;                           // which averages are in the weights' memory
    std::vector<TensorView> whole;      // the weights' memory, with the parts that other replicas own
    std::vector<TensorView> weights;    // this rank's parts of it; parallel to parts
    std::vector<kernels::Memory> kept;  // parallel to parts: weights whose dtype does not swap in place, else empty
    size_t exchanged = 0;
    bool shared = false;
  };
  std::optional<Swap> swap;

  struct Met {
    int64_t step, elements;
    size_t part;  // the first with a NaN or Inf; parts.size(): not known
  };
  std::optional<Met> met;  // not forgotten yet

  int64_t elements = 0;  // of one average
  int64_t bytes_per_update = 0;
  double seconds = 0;
  double hidden_seconds = 0, waited_seconds = 0;

  Impl(std::span<const TensorView> parameters, AverageOptions chosen);

  void allocate();
  void bind(std::span<const TensorView> parameters);
  std::vector<std::unique_ptr<average::Backend>> make_backends(std::span<const TensorView> bound) const;
  void copy_parameters();
  void read_counts();
  void set_state(const average::State& state, OptionsFrom from);
  enum class Launch { kNow, kByReplay };
  UpdateReport update(std::optional<int64_t> step, double samples, std::span<const Factors> given = {}, Launch launch = Launch::kNow);
  void wait();
  void set_stream(int index, void* stream);
  void follow_streams(std::span<const TensorView> views);
  std::vector<TensorView> divide(std::span<const TensorView> views) const;
  void swap_in(std::span<const TensorView> weights, size_t k);
  void swap_out();
  void take_back(std::span<const TensorView> weights);

 private:
  UpdateReport begin_update(std::optional<int64_t> step, double samples, std::span<const Factors> given, Launch launch);
  int64_t next_step(std::optional<int64_t> step) const;
  bool copies_at(int64_t step) const;
  void apply(UpdateReport& report, int64_t step, double samples, std::span<const Factors> given, Launch launch);
  bool capturing() const;
  void capture();
  kernels::Step plan_step(int64_t step, double samples, std::span<const Factors> given, Factors* first) const;
  kernels::Step::One plan_one(const Factors& factors) const;
  bool draws_by_runs(const kernels::Step& step) const;
  void prepare_noise(const kernels::Step& step);
  average::NonFiniteCount dispatch(const kernels::Step& step);
  void begin_overlapped(const kernels::Step& step);
  void met_non_finite(const average::NonFiniteCount& count, int64_t step);
  void hold(const average::NonFiniteCount& count, int64_t step);
  size_t part_of(const void* element) const;
  Swap prepare_swap(std::span<const TensorView> weights, size_t k) const;
  void exchange_in();
  void exchange_out();

  // An overlapped update, from begin_overlapped() to wait(). The thread writes count and seconds; averages are its own meanwhile.
  struct UnderWay {
    kernels::Step step;
    average::NonFiniteCount count;
    double seconds;
  };
  std::optional<UnderWay> under_way_;
  int64_t unreported_ = 0;                             // NaN and Inf that overlapped updates met, until a report tells of them
  std::unique_ptr<base::ThreadPool> background_pool_;  // null without options.overlap, as the next one
  std::unique_ptr<base::Worker> worker_;               // the last member: ends first
};

}  // namespace shardow
