// Average: exponential moving averages (EMA) of the weights that this rank holds.
//
//   Average ema(views, {.schedules = {Schedule::constant(0.9999)}});  // views of the weights' own memory
//   ema.update();  // after each optimizer step
//   { const Swapped swapped(ema); evaluate(); }                       // inside, the weights are the averages
//   save(group, ema, "run/ema.safetensors");
//
// Read this first, then tensor_view.h, region.h, schedule.h, ema_file.h. Programs: docs/cpp.md; rare cases:
// docs/cpp_reference.md.
//
// An update is e += (1 - decay) (p - e), without communication. Views' memory and streams are borrowed until the
// Average ends or bind() names others. One thread at a time, but for stats() and decays(). Calls throw Error (error.h).
#pragma once

#include <optional>
#include <span>

#include "shardow/average_options.h"

#pragma GCC visibility push(default)
namespace shardow {

namespace average {
struct [[gnu::visibility("hidden")]] Inside;
class [[gnu::visibility("hidden")]] OtherMemory;
}  // namespace average

struct UpdateReport {
  bool applied = false;    ///< false: skipped by update_every
  int64_t non_finite = 0;  ///< elements met; CUDA: see stats()
  int64_t bytes_moved = 0;
  Factors factors{1, 0};  ///< of the first schedule
};

/// Of this rank; bytes_moved and seconds are the last update's.
struct AverageStats {
  int64_t step = 0;
  int64_t updates = 0;
  int64_t parameters = 0, elements = 0;
  int64_t bytes = 0;
  int64_t bytes_moved = 0;
  double seconds = 0;
  int64_t offload_bytes = 0;
  double hidden_seconds = 0;
  double waited_seconds = 0;
  int64_t held_non_finite = 0;
  int64_t table_bytes = 0;
};

struct NonFiniteReport {
  int64_t step, elements;
  std::string tensor;  ///< the first that had one
};

enum class OptionsFrom {
  kFile,  ///< the run goes on bit-identically
  kOwn,   ///< the Average's, with the saved counters
};

struct OptionDifference {
  std::string name, file, own;
};

class Average {
 public:
  /// Averages begin as copies, on the weights' device.
  explicit Average(std::span<const TensorView> weights, AverageOptions options = {});

  /// In the caller's memory, there or on the host: averages[k] has the weights' names and regions (with
  /// options.replicas this rank's part()s), in order, in options.dtype.
  template <int = 0>
  Average(std::span<const TensorView> weights, std::span<const std::vector<TensorView>> averages,
          AverageOptions options = {})
      : Average({weights.begin(), weights.end()}, {averages.begin(), averages.end()}, std::move(options), nullptr) {}

  Average(Average&&) noexcept;
  Average& operator=(Average&&) noexcept;

  /// Takes an open swap back: the weights' memory must still be there.
  ~Average();

  /// After an optimizer step. `step`: your own growing count; else calls are counted. `samples`: of training so far.
  /// CUDA: enqueued on the views' streams.
  UpdateReport update(std::optional<int64_t> step = std::nullopt, double samples = 0);
  UpdateReport update(std::span<const TensorView> weights, std::optional<int64_t> step = std::nullopt,
                      double samples = 0);

  /// The same views at other addresses or on other streams.
  void bind(std::span<const TensorView> weights);

  /// By your own schedule: factors for each of schedules(), made of progress().
  UpdateReport update_by(std::span<const Factors> factors, std::optional<int64_t> step = std::nullopt);

  void set_decay(double decay);  ///< of Schedule::settable(), from the next update() on; state() has it

  Progress progress(double samples = 0) const noexcept;  ///< of the next step, as decays()
  std::vector<double> decays() const;
  std::span<const Schedule> schedules() const noexcept;

  void reset();  ///< averages = weights; counters stay

  /// Exchanges weights and k-th averages in place; swap_out() restores all bits. Collective with options.replicas.
  void swap_in(size_t k = 0);

  /// Into other weights than those averaged: the same names and regions, of any dtype.
  void swap_in(std::span<const TensorView> weights, size_t k = 0);

  void swap_out();                ///< may be called again where it throws
  bool swapped() const noexcept;  ///< no update() or views() then

  size_t size() const noexcept;                           ///< averages of each weight
  std::span<const TensorView> views(size_t k = 0) const;  ///< valid until a move or the end
  AverageStats stats() const;                             ///< CUDA: waits
  std::optional<NonFiniteReport> non_finite() const;      ///< the first met; CUDA: waits
  void forget_non_finite() noexcept;

  // Counters and options, for files of your own.
  std::string state() const;
  void set_state(std::string_view json, OptionsFrom options = OptionsFrom::kFile);
  std::vector<OptionDifference> differences(std::string_view json) const;  ///< what set_state() would change

  // Of updates in the background: options.overlap, or averages on the host of weights on devices.

  void finish_reading() const;  ///< call before weights are written, or averages silently mix steps
  void wait() const;            ///< for the update's end

  void set_stream(int index, void* stream);  ///< a device's cudaStream_t from here on

  /// Before each replay of a CUDA graph with update(), on its stream.
  UpdateReport prepare_replay(std::optional<int64_t> step = std::nullopt, double samples = 0);

 private:
  Average(std::vector<TensorView> weights, std::vector<std::vector<TensorView>> averages, AverageOptions options,
          std::shared_ptr<average::OtherMemory> other);

  friend struct average::Inside;
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// While it lives the weights are the averages; `ema` must not move. Where its end fails ema.swapped() stays true.
class Swapped {
 public:
  [[nodiscard]] explicit Swapped(Average& ema, size_t k = 0) : ema_(ema) { ema_.swap_in(k); }
  [[nodiscard]] Swapped(Average& ema, std::span<const TensorView> weights, size_t k = 0) : ema_(ema) {
    ema_.swap_in(weights, k);
  }
  ~Swapped();

  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

 private:
  Average& ema_;
};

}  // namespace shardow
#pragma GCC visibility pop
