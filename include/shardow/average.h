// Average: exponential moving averages of the parameters that this rank holds.
//
//   e <- e + w (p - e)          w = 1 - decay, from a Schedule, in float64, rounded once
//
//   Average ema(views, {.schedules = {Schedule::constant(0.9999)}});  // views of the parameters' own memory
//   ema.update();                                                     // after each optimizer step
//   ema.swap_in();                                                    // the parameters are the averages: evaluate
//   ema.swap_out();                                                   // bit for bit what they were
//   save(group, ema, "run/ema.safetensors");                          // ema_file.h
//
// One pass reads every parameter once, in its own dtype, and reads and writes every average once: (size(p) + 8 K) bytes an element for K
// fp32 averages. No communication, no allocation, no lock, no temporaries. The result depends on neither topology, threads, instruction set
// nor device.
//
// The views' memory is the caller's, and must live as long as the Average or until bind() names other memory. One thread uses an Average at
// a time: a call that meets another thread's throws kInvalidArgument. Of what throws, nothing has changed but where it says so.
//
// To read with it: error.h; tensor_view.h and region.h, what a rank holds of a tensor; schedule.h; group.h, the ranks; ema_file.h. For
// other tensors in files: checkpoint.h. conformance.h judges a Group of one's own. The others (placement.h, division.h, copy.h)
// are for trainers that bring shardings of their own.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/group.h"
#include "shardow/schedule.h"
#include "shardow/tensor_view.h"

#pragma GCC visibility push(default)
namespace shardow {

/// How the new average is rounded together; bit for bit what the named origin computes.
enum class Rule {
  kLerp,             ///< fma(w, p - e, e), for w >= 0.5 fma(w - 1, p - e, p): the accurate one (torch.lerp)
  kMulAdd,           ///< fma(p, 1-d, round(e d)): mul_().add_(), biased for long decays
  kTwoProducts,      ///< round(e d) + round(p (1-d)): timm's ModelEma
  kDifference,       ///< e - round(w (e - p)): torch-ema, diffusers
  kFusedDifference,  ///< fma(w, p - e, e) for every w: diffusers with foreach
  kQuotient,         ///< e + round((p - e) / D), D = 1 / w, a whole number where that is near one: torch's SWA
};

enum class Rounding {
  kAuto,  ///< stochastic where w < 5e-5, else to nearest
  kNearest,
  kStochastic,  ///< of the increment, by a counter (seed, step, global element): the same for any topology
};

/// What a NaN or Inf in a parameter does to its average.
enum class NonFinite {
  kHold,       ///< the element keeps its average and is counted
  kPropagate,  ///< ordinary arithmetic
  kRaise,      ///< hold, then throw kInvalidArgument naming the first tensor
};

struct AverageOptions {
  std::vector<Schedule> schedules = {Schedule::constant(0.9999)};  ///< one average per schedule, all in one pass; 1 to 8
  DType dtype = DType::kF32;  ///< of the averages: kF32, kF64; kBF16 and kF16 only with stochastic rounding and kLerp
  Rule rule = Rule::kLerp;
  Rounding rounding = Rounding::kAuto;
  NonFinite non_finite = NonFinite::kHold;
  int64_t update_every = 1;  ///< average every n-th step, with decay^n
  int64_t start_step = 0;    ///< an update at a step <= start_step copies the parameters; so does the first one past it if none came before
  uint64_t seed = 0;         ///< of stochastic rounding
  bool keep_values = false;  ///< the averages begin with what their memory holds, not equal to the parameters
  int num_threads = 0;       ///< 0: what OMP_NUM_THREADS and the affinity mask allow; with `overlap`, of weights on the host, 1
  bool overlap = false;      ///< update() returns when its work has begun on threads in the background; see wait(). Averages on the host
  int64_t ring_bytes = int64_t{128} << 20;  ///< pinned memory, in all, through which weights on devices reach averages on the host
  Group* replicas = nullptr;  ///< ranks that hold the same views: each averages 1/size() of every view. Borrowed; nullptr: no replicas
  std::chrono::milliseconds timeout{600'000};  ///< of what `replicas` send each other in a swap
};

/// Whose options an Average goes on with after set_state().
enum class OptionsFrom {
  kFile,  ///< those that the state was saved with: the run goes on bit-identically
  kOwn,   ///< the Average's own, from the saved counters on
};

/// An option that a saved state and an Average do not share, in their JSON's words.
struct OptionDifference {
  std::string
      name;  ///< schedule (schedule/0, schedule/1, ... of several), schedules, rule, rounding, update_every, start_step, seed, dtype
  std::string file, own;
};

struct UpdateReport {
  bool applied = false;    ///< false between the update_every-th steps
  int64_t non_finite = 0;  ///< elements held in this update, CPU views; in the background: in updates that ended since the last report;
                           ///< CUDA views are counted by stats()
  int64_t bytes_moved = 0;
  Factors factors{1, 0};  ///< of the first schedule
};

/// Parameters that were NaN or Inf at an update.
struct NonFiniteReport {
  int64_t step;        ///< of the update; CUDA: of the last one before somebody asked
  int64_t elements;    ///< of that update, on this rank; CUDA: of all since somebody asked
  std::string tensor;  ///< the first that has one
};

/// What an Average holds and did.
struct AverageStats {
  int64_t step = 0, updates = 0;
  int64_t parameters = 0, elements = 0;  ///< elements that this rank averages, of one average
  int64_t bytes = 0;                     ///< memory of all averages on this rank
  int64_t bytes_moved = 0;               ///< by the last update
  double seconds = 0;                    ///< of the last update; CUDA: of its launch
  int64_t offload_bytes = 0;    ///< averages on the host: what updates copied from devices, since the start; the weights' own bytes
  double hidden_seconds = 0;    ///< of all updates' work in the background, while nobody waited for it
  double waited_seconds = 0;    ///< somebody waited for work in the background, in all
  int64_t held_non_finite = 0;  ///< elements, since the start
  int64_t table_bytes = 0;      ///< memory of the lists of what an update goes through
};

/// How far a swap has come: all that the way back needs to know, whatever interrupted it.
struct SwapState {
  std::optional<size_t> average;  ///< the one that is swapped in, or partly; none: the weights are where they belong
  size_t exchanged = 0;           ///< views of which this rank's part holds averages, or some of them, the first ones
  bool shared = false;            ///< parts that other replicas own may hold averages: the way back needs those replicas
};

class Average {
 public:
  /// Begins with averages equal to `parameters`. `averages[k]` is the memory of the k-th average: one view per parameter with the same
  /// name, the region that this rank averages and dtype options.dtype, on the parameter's device or on the host; it is the caller's,
  /// aligned to 64 bytes for full speed. Throws kInvalidArgument where names, regions, dtypes or options do not fit, before anything is
  /// written.
  Average(std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages, AverageOptions options = {});

  /// The same, with memory of its own, each average aligned to 64 bytes.
  explicit Average(std::span<const TensorView> parameters, AverageOptions options = {});

  Average(Average&&) noexcept;
  Average& operator=(Average&&) noexcept;

  /// Ends what is done in the background. Where a swap is open it takes the weights back first, so their memory must be there still; with
  /// options.replicas this rank's parts alone, since nobody can be waited for here: call swap_out() before.
  ~Average();

  // ---- Training

  /// After an optimizer step, on the parameters as last bound. Without `step` it counts itself; a given step must exceed the last one.
  /// `samples`: training samples seen so far, for schedules in samples. CUDA views: enqueued on the view's stream, nothing waits; where
  /// their averages are on the host, done by threads in the background, see wait() and finish_reading().
  UpdateReport update(std::optional<int64_t> step = std::nullopt, double samples = 0);

  /// update() after bind(parameters).
  UpdateReport update(std::span<const TensorView> parameters, std::optional<int64_t> step = std::nullopt, double samples = 0);

  /// Parameters as at construction, in the same order; only addresses and streams may have changed. Throws kInvalidArgument otherwise.
  /// Where nothing moved it costs a comparison of each view, 7 us for 2,000 of them that lie in a cache, and allocates nothing.
  void bind(std::span<const TensorView> parameters);

  /// update() by the caller's own schedule: `factors`, one of each average, in place of the Average's. Throws kInvalidArgument where their
  /// number is another.
  UpdateReport update_by(std::span<const Factors> factors, std::optional<int64_t> step = std::nullopt);

  /// Until the update under way in the background, if any, has ended. All calls that read or change averages, counters or addresses begin
  /// with it, as a fork does. Throws, once, what that update met in the weights (NonFinite::kRaise).
  ///
  /// Weights on a device that do not reach their averages on the host are told here as well. Where all weights fit the ring, that update
  /// was not made: counters are as before it, and the next one makes up for it. Where they don't, some averages are made already: every
  /// call takes the update up where it stopped, and throws until one ends it, so that nobody reads averages of two steps. Where the weights
  /// may have changed meanwhile, all calls throw until reset().
  void wait() const;

  /// To be called before the parameters change, where something is done in the background. Averages on the host of weights on devices: what
  /// comes next on the weights' streams waits, on the device, for the last copy; the host waits until all copies are on their way, and no
  /// longer (while a stream is captured: until they have ended). Weights on the host with options.overlap: wait(). Throws as wait() does.
  void finish_reading() const;

  /// Copies the bound parameters into every average, exactly as at construction; steps and counters stay.
  void reset();

  /// The averages begin again, as newly made: reset(), at step 0, with nothing counted or noted. Options stay.
  void restart();

  // ---- Evaluation

  /// Exchanges the k-th averages and the bound parameters, element by element, in place; swap_out() undoes it bit for bit.
  /// Parameters of another dtype receive rounded averages; what rounding cut off is kept aside, so that the way back is exact. (bfloat16
  /// weights with float32 averages need no memory for that; ties then round away from zero.) Where it fails halfway, what was exchanged is
  /// taken back. With options.replicas: collective, and every replica ends with the whole averages.
  void swap_in(size_t k = 0);
  /// The same with weights that are not the bound parameters, where a master copy of another dtype is averaged: same names and regions,
  /// same order.
  void swap_in(std::span<const TensorView> weights, size_t k = 0);

  /// The weights back, from whatever point a swap has reached; where it throws it can be called again. Does nothing where nothing is
  /// swapped in. With options.replicas: collective.
  void swap_out();

  bool swapped() const noexcept;  ///< the weights' memory holds averages, or may: from the first exchange to settle()

  // ---- What it holds, and its state; in files: ema_file.h

  size_t size() const noexcept;  ///< K, the number of averages of each parameter
  /// The k-th averages, in the parameters' order. Throws kInvalidArgument while swapped.
  std::span<const TensorView> views(size_t k = 0) const;
  AverageStats stats() const;  ///< CUDA: waits for the last update's counter

  /// The first update since the start, set_state() or forget_non_finite() that met NaN or Inf and did not propagate it: so that ranks can
  /// tell each other when they meet next. CUDA: waits for the last update's counter.
  std::optional<NonFiniteReport> non_finite() const;
  void forget_non_finite() noexcept;

  /// Steps, updates, samples, schedules, rule, rounding and seed as JSON: with the averages themselves all that is needed to go on
  /// bit-identically.
  std::string state() const;
  /// Takes the counters of `json`, and with OptionsFrom::kFile its schedules, rule, rounding, update_every, start_step and seed too; the
  /// dtype is that of memory. Throws kCorrupt, or kInvalidArgument where the number of averages is another or dtype and the file's rule or
  /// rounding exclude each other, before anything changes.
  void set_state(std::string_view json, OptionsFrom options = OptionsFrom::kFile);

  /// What set_state(json) would change of the options, and the dtype where it differs; empty: nothing. Throws kCorrupt.
  std::vector<OptionDifference> differences(std::string_view json) const;

  /// In force, one of each average.
  std::span<const Schedule> schedules() const noexcept;

  /// Of the next step, one of each average; NaN where its schedule has none.
  std::vector<double> decays() const;

  /// Where training stands, at once, without waiting for an update under way: steps counted, updates applied, steps since the last that
  /// changed the averages, samples by then.
  Progress progress() const noexcept;

  /// Training samples seen at the next step, where each one since the last that changed the averages has `batch` of them.
  double samples_by(double batch) const noexcept;

  // ---- For callers who drive streams, graphs and replicas themselves

  /// Of CUDA views on device `index`: from here on all work goes to `stream` (a cudaStream_t), behind what is under way on the last one.
  /// Nothing waits on the host.
  void set_stream(int index, void* stream);

  /// An update() on a stream that is being captured is recorded, not counted: a replay repeats its launch with the numbers that this call,
  /// before the replay on the same stream, works out and counts as update() does. A replay without it does nothing the first time, and
  /// repeats the last step after that. Views on a CPU are updated by this call itself.
  UpdateReport prepare_replay(std::optional<int64_t> step = std::nullopt, double samples = 0);

  /// swap_out() in two steps, for callers who send replicas their parts themselves: share() before other replicas' memory is overwritten,
  /// take_back() for what this rank owns, and settle() when all of the weights are back. `weights`: as in swap_in(), with the same
  /// contents; their addresses may have changed. The last two do nothing where nothing is swapped in.
  void share();
  void take_back(std::span<const TensorView> weights);
  void settle();

  /// From now on the end of this Average leaves an open swap where it stands: the weights' memory keeps the averages, and is not touched.
  /// For callers whose weights' memory may go first.
  void abandon_swap() noexcept;

  SwapState swap_state() const noexcept;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardow
#pragma GCC visibility pop
