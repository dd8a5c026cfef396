// Average: exponential moving averages of the weights that this rank holds. Read this header first.
//
//   shardow::Average ema(views, {.schedules = {Schedule::constant(0.9999)}});  // views of the weights' own memory: tensor_view.h
//   ema.update();                                                              // after each optimizer step
//   { const Swapped swapped(ema); evaluate(); }                                // inside, the weights are the averages
//   save(group, ema, "run/ema.safetensors");                                   // ema_file.h
//
// An update is e <- e + w (p - e) with w = 1 - decay. It reads every weight once and reads and writes every average once. After the first
// it allocates nothing and takes no lock. It needs no communication: ranks average what they hold, and the numbers are the same for any
// division, thread count, instruction set and device.
//
// Lifetimes. Views are copied. What they point at (weights, the caller's memory for averages, CUDA streams) is borrowed until the Average
// ends or bind() names other memory, and so is options.replicas.
//
// Threads. One at a time uses an Average. A call that meets another thread's throws kInvalidArgument, but for noexcept ones.
//
// Errors. Where a call throws (error.h), nothing has changed, unless it says so.
//
// Then read average_options.h, tensor_view.h, schedule.h, ema_file.h; region.h where weights are sharded, and group.h, the ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/average_options.h"
#include "shardow/schedule.h"
#include "shardow/tensor_view.h"

#pragma GCC visibility push(default)
namespace shardow {

namespace average {
struct Driver;  // src/average/driver.h
}

struct UpdateReport {
  bool applied = false;    ///< the averages changed; false between the update_every-th steps
  int64_t non_finite = 0;  ///< elements held; in the background: by updates that ended since the last report; CUDA: in stats() alone
  int64_t bytes_moved = 0;
  Factors factors{1, 0};  ///< of the first schedule
};

struct AverageStats {
  int64_t step = 0;                      ///< last one counted
  int64_t updates = 0;                   ///< that averaged: copies up to start_step do not count
  int64_t parameters = 0, elements = 0;  ///< that this rank averages
  int64_t bytes = 0;                     ///< memory of all averages on this rank
  int64_t bytes_moved = 0;               ///< by the last update
  double seconds = 0;                    ///< of the last update; CUDA: of its launch
  int64_t offload_bytes = 0;             ///< of weights that were copied from devices to the host
  double hidden_seconds = 0;             ///< of work in the background that nobody waited for
  double waited_seconds = 0;             ///< of work in the background that somebody waited for
  int64_t held_non_finite = 0;           ///< elements, since the start
  int64_t table_bytes = 0;               ///< memory of the lists of what an update goes through
};

struct NonFiniteReport {
  int64_t step;        ///< of the update; CUDA: the last before the question
  int64_t elements;    ///< of the update, on this rank; CUDA: since the last question
  std::string tensor;  ///< the first that has one
};

/// Whose options an Average goes on with after set_state().
enum class OptionsFrom {
  kFile,  ///< those that the state was saved with: the run goes on bit-identically
  kOwn,   ///< the Average's own, from the saved counters on
};

/// An option that a saved state and an Average do not share, in their JSON's words: schedule (schedule/0, schedule/1, ... of several),
/// schedules (how many), rule, rounding, update_every, start_step, seed, dtype.
struct OptionDifference {
  std::string name, file, own;
};

class Average {
 public:
  /// Averages that begin equal to the weights, in memory of their own on the weights' device. All weights are on one. Throws
  /// kInvalidArgument where two views share memory (weights or averages), a name comes twice, a dtype has no averages, `data` is null.
  explicit Average(std::span<const TensorView> weights, AverageOptions options = {});

  /// The same in the caller's memory, on the weights' device or on the host. `averages[k]` has a view for each weight, in the same order:
  /// its name, its region (with options.replicas: this rank's part() of it), options.dtype; aligned to 64 bytes for full speed.
  Average(std::span<const TensorView> weights, std::span<const std::vector<TensorView>> averages, AverageOptions options = {});

  Average(Average&&) noexcept;
  Average& operator=(Average&&) noexcept;

  /// Waits for work in the background. Takes an open swap back, so the weights' memory must be there still; with options.replicas this
  /// rank's part alone, since a destructor waits for no other rank.
  ~Average();

  // ---- Training

  /// After an optimizer step. Without `step` it counts by itself; a given one must exceed the last. `samples`: training samples seen so
  /// far, for schedules in samples. Of CUDA views it is enqueued on their stream, and nothing waits.
  UpdateReport update(std::optional<int64_t> step = std::nullopt, double samples = 0);

  /// update() after bind(weights).
  UpdateReport update(std::span<const TensorView> weights, std::optional<int64_t> step = std::nullopt, double samples = 0);

  /// The weights have moved: the same views in the same order, with other addresses and streams. Where nothing moved it costs 7 us for
  /// 2,000 views in a cache.
  void bind(std::span<const TensorView> weights);

  /// update() by a schedule of the caller's: `factors`, one of each average, for where progress() says that the step stands.
  UpdateReport update_by(std::span<const Factors> factors, std::optional<int64_t> step = std::nullopt);

  /// The next step, as schedules will see it. `samples`: as update() will be told.
  Progress progress(double samples = 0) const noexcept;

  /// Decay of the next step by itself, one of each average; NaN where a schedule has none. For logs: an update has the product of the
  /// decays of update_every steps, and up to start_step it copies.
  std::vector<double> decays() const;

  std::span<const Schedule> schedules() const noexcept;  ///< in force

  /// The averages become the weights; steps and counters stay.
  void reset();

  // ---- Evaluation

  /// The k-th averages and the weights change places, without further memory where dtypes allow it; swap_out() undoes it bit for bit.
  /// Weights of another dtype get rounded averages. All or nothing, on all of options.replicas, for whom it is collective. Only where the
  /// way back fails too (a device is lost; a replica is gone, with its part of the weights) swapped() stays true: this rank's part is back
  /// as far as it can be, update() is refused, and swap_out() tries again.
  void swap_in(size_t k = 0);

  /// The same with other weights than the bound ones, where a master copy is averaged: same names, regions and order, of any dtype.
  void swap_in(std::span<const TensorView> weights, size_t k = 0);

  /// The weights back, from whatever point a swap has reached; where it throws, call it again. With options.replicas collective.
  void swap_out();

  bool swapped() const noexcept;  ///< weights' memory holds averages, or may

  // ---- What it holds

  size_t size() const noexcept;                           ///< K, the number of averages of each weight
  std::span<const TensorView> views(size_t k = 0) const;  ///< the k-th averages; valid until the end or a move. Throws while swapped
  AverageStats stats() const;                             ///< CUDA: waits for the last update

  /// The first update that met NaN or Inf since forget_non_finite(): so that ranks can tell each other. CUDA: waits as stats() does.
  std::optional<NonFiniteReport> non_finite() const;
  void forget_non_finite() noexcept;

  // ---- Its state, for files of one's own; ema_file.h does all of it

  /// Counters and options as JSON: with the averages all that is needed to go on bit-identically.
  std::string state() const;

  /// Takes counters, and with kFile schedules, rule, rounding, update_every, start_step and seed. Throws kCorrupt, and kInvalidArgument
  /// where the number of averages differs or the options do not go with the dtype.
  void set_state(std::string_view json, OptionsFrom options = OptionsFrom::kFile);

  /// What set_state(json) would change of the options, and the dtype where it differs. Throws kCorrupt.
  std::vector<OptionDifference> differences(std::string_view json) const;

  // ---- Updates in the background: options.overlap, or averages on the host of weights on devices
  //
  //   optimizer.step();  ema.update();  forward, backward;  ema.finish_reading();  optimizer.step();  ...
  //
  // update() returns when its work has begun, and goes on reading the weights. Call finish_reading() before they are written: without it
  // averages get values of two steps, and nobody finds out. What an update meets (NonFinite::kRaise, a lost device) is thrown by the next
  // call that waits for it, by update() when its own work has begun. All other calls of the Average wait by themselves.

  /// When it returns the weights may be written: those on the host at once; those on devices by work on their streams, which wait for the
  /// copies that are under way (while a stream is captured, this call does).
  void finish_reading() const;

  /// Until the update under way, if any, has ended. Where weights did not reach the host, the error says what became of the update: not
  /// made (counters are as before it, and the next one makes up for it); stopped halfway (each call goes on with it, and throws until one
  /// ends it); or stopped after the weights may have changed (all calls throw until reset()).
  void wait() const;

  // ---- CUDA streams and graphs

  /// From here on all work on device `index` goes to `stream` (a cudaStream_t), behind what is under way on the last one.
  void set_stream(int index, void* stream);

  /// An update() on a stream that is captured is recorded, not counted. Call this before each replay, on the same stream: it counts the
  /// step and gives the replay its numbers; a replay without it repeats the last step's. Of views on a CPU it is the update.
  UpdateReport prepare_replay(std::optional<int64_t> step = std::nullopt, double samples = 0);

 private:
  friend struct average::Driver;
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// While it lives the weights are the averages. `ema` stays where it is meanwhile.
///
/// Its end throws nothing: where the way back fails, the swap stays open, update() says so, and ema.swap_out() tries again and tells why.
/// With options.replicas both ends are collective.
class Swapped {
 public:
  [[nodiscard]] explicit Swapped(Average& ema, size_t k = 0) : ema_(ema) { ema_.swap_in(k); }
  [[nodiscard]] Swapped(Average& ema, std::span<const TensorView> weights, size_t k = 0) : ema_(ema) { ema_.swap_in(weights, k); }
  ~Swapped();

  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

 private:
  Average& ema_;
};

}  // namespace shardow
#pragma GCC visibility pop
