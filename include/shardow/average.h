// Average: exponential moving averages (EMA) of the weights that this rank holds.
//
//   Average ema(views, {.schedules = {Schedule::constant(0.9999)}});  // views of the weights' own memory
//   ema.update();                                                     // after each optimizer step
//   { const Swapped swapped(ema); evaluate(); }                       // inside, the weights are the averages
//   save(group, ema, "run/ema.safetensors");
//
// Read this first, then tensor_view.h, region.h, schedule.h, ema_file.h; then average_options.h, error.h, group.h, checkpoint.h. The other
// six are for special needs. docs/cpp.md has programs and, header by header, rare cases.
//
// An update is e <- e + w (p - e), w = 1 - decay, in one pass over memory, without communication. Sharding, threads and device do not
// change its numbers.
//
// Memory and streams of views are borrowed until the Average ends or bind() names others. One thread at a time uses an Average. Calls throw
// Error (error.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardow/average_options.h"
#include "shardow/schedule.h"
#include "shardow/tensor_view.h"

#pragma GCC visibility push(default)
namespace shardow {

namespace average {
struct Driver;
}

struct UpdateReport {
  bool applied = false;    ///< false where update_every skips a step
  int64_t non_finite = 0;  ///< elements that had NaN or Inf; CUDA: in stats()
  int64_t bytes_moved = 0;
  Factors factors{1, 0};  ///< of the first schedule
};

struct AverageStats {
  int64_t step = 0;                      ///< the last one counted
  int64_t updates = 0;                   ///< that averaged, not copied
  int64_t parameters = 0, elements = 0;  ///< averaged by this rank
  int64_t bytes = 0;                     ///< of all averages
  int64_t bytes_moved = 0;               ///< by the last update
  double seconds = 0;                    ///< of the last update (CUDA: its launch)
  int64_t offload_bytes = 0;             ///< copied from devices to the host
  double hidden_seconds = 0;             ///< of background work, not waited for
  double waited_seconds = 0;             ///< of background work, waited for
  int64_t held_non_finite = 0;           ///< elements, since the start
  int64_t table_bytes = 0;               ///< of internal tables
};

struct NonFiniteReport {
  int64_t step, elements;  ///< of the update
  std::string tensor;      ///< the first that had one
};

/// Whose options hold after a load.
enum class OptionsFrom {
  kFile,  ///< the saved ones: the run goes on bit-identically
  kOwn,   ///< the Average's, from the saved counters on
};

/// An option that a file has otherwise.
struct OptionDifference {
  std::string name, file, own;
};

class Average {
 public:
  /// Averages begin as copies of the weights, on the weights' device. Views must not overlap.
  explicit Average(std::span<const TensorView> weights, AverageOptions options = {});

  /// In the caller's memory, there or on the host: averages[k] has a view for each weight, in order, of its name and region (with
  /// options.replicas this rank's part() of it) and options.dtype. A template, so that (weights, {}) is the constructor above.
  template <int = 0>
  Average(std::span<const TensorView> weights, std::span<const std::vector<TensorView>> averages, AverageOptions options = {})
      : Average(weights, averages, std::move(options), nullptr) {}

  Average(Average&&) noexcept;
  Average& operator=(Average&&) noexcept;

  /// Waits for background work and takes an open swap back: the weights' memory must be there still.
  ~Average();

  // ---- Training

  /// After an optimizer step. `step`: your own count, which must grow; else calls are counted. `samples`: training samples so far, for
  /// schedules that ask. On CUDA it is enqueued on the views' stream.
  UpdateReport update(std::optional<int64_t> step = std::nullopt, double samples = 0);

  /// After bind(weights).
  UpdateReport update(std::span<const TensorView> weights, std::optional<int64_t> step = std::nullopt, double samples = 0);

  /// The weights have moved: the same views, in order, with other addresses or streams.
  void bind(std::span<const TensorView> weights);

  /// By your own schedule: factors for each average, made of progress().
  UpdateReport update_by(std::span<const Factors> factors, std::optional<int64_t> step = std::nullopt);

  Progress progress(double samples = 0) const noexcept;  ///< of the next step
  std::vector<double> decays() const;                    ///< of the next step, for logs
  std::span<const Schedule> schedules() const noexcept;

  void reset();  ///< copies the weights to the averages; counters stay

  // ---- Evaluation

  /// Exchanges the k-th averages and the weights, in place, all or nothing; swap_out() undoes it bit for bit. Weights of another dtype get
  /// rounded averages. With options.replicas both are collective.
  void swap_in(size_t k = 0);

  /// Into other weights of the same names, regions and order, any dtype, where a master copy is averaged.
  void swap_in(std::span<const TensorView> weights, size_t k = 0);

  void swap_out();                ///< where it throws, call it again
  bool swapped() const noexcept;  ///< update() and views() throw then

  // ---- What it holds

  size_t size() const noexcept;                           ///< averages of each weight
  std::span<const TensorView> views(size_t k = 0) const;  ///< the k-th averages; until the end or a move
  AverageStats stats() const;                             ///< CUDA: waits

  std::optional<NonFiniteReport> non_finite() const;  ///< the first meeting since forget_non_finite(); CUDA: waits
  void forget_non_finite() noexcept;

  // ---- State, for files of your own; else ema_file.h does it all

  std::string state() const;  ///< counters and options, as JSON

  /// Counters and, with kFile, options.
  void set_state(std::string_view json, OptionsFrom options = OptionsFrom::kFile);

  std::vector<OptionDifference> differences(std::string_view json) const;  ///< which options set_state() would change

  // ---- Updates in the background: options.overlap, or averages on the host of weights on devices
  //
  //   optimizer.step();  ema.update();  forward, backward;  ema.finish_reading();  optimizer.step();  ...
  //
  // update() returns while the weights are still being read. The next call throws its errors.

  /// Before weights are written: without it averages silently mix two steps.
  void finish_reading() const;

  void wait() const;  ///< until the update has ended

  // ---- CUDA streams and graphs

  /// Later work on device `index` goes to `stream`, a cudaStream_t.
  void set_stream(int index, void* stream);

  /// Before each replay of a graph that captured update(), on its stream: counts the step.
  UpdateReport prepare_replay(std::optional<int64_t> step = std::nullopt, double samples = 0);

 private:
  Average(std::span<const TensorView> weights, std::span<const std::vector<TensorView>> averages, AverageOptions options, std::nullptr_t);

  friend struct average::Driver;
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// While it lives the weights are the averages; `ema` must not move. Its end throws nothing: where it fails ema.swapped() stays true, and
/// ema.swap_out() tells why.
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
