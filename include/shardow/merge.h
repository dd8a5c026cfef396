// Averages after the fact: out = sum of c_j x_j over checkpoints, read once, chunk by chunk, written as every save is.
//
//   std::vector<MergeInput> inputs = {{"step-100", Checkpoint::open("step-100")}, {"step-200", Checkpoint::open("step-200")}};
//   for (MergeInput& input : inputs) input.step = step_of(input.name, std::get<Checkpoint>(input.tensors));
//   sort_by_step(inputs);
//   const Coefficients coefficients = decay_coefficients(DecayCurve::kLinear, steps_of(inputs));
//   for (size_t j = 0; j < inputs.size(); ++j) inputs[j].coefficient = coefficients.values[j];
//   merge(*solo(), inputs, "merged", {.formula = coefficients.formula});
//
// Sums are made in float64 by fused multiply-adds, in the order of (step, name), and rounded once to the output's dtype: the same inputs
// with the same coefficients give the same bytes, whatever their order, the threads, the ranks. docs/merging.md has the formulas.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "shardow/checkpoint.h"
#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

// ---- coefficients: pure functions, in the order of what they are given

struct Coefficients {
  std::vector<double> values;
  std::string formula;  ///< in one line, for people and for the file's header
  /// Where steps matter: how far the learning rate that weights by index imply is from the one that was asked for, at most, in parts of
  /// its peak. 0 where checkpoints are evenly spaced.
  std::optional<double> index_error = {};
};

Coefficients uniform_coefficients(size_t inputs);

/// As they are given, whatever their sum; or divided by it, which must not be 0 then.
Coefficients given_coefficients(std::vector<double> weights, bool normalize = false);

/// Inputs ascend in time: e_0 = x_0, e_j = d e_{j-1} + (1 - d) x_j, with the decay d of one input to the next, or d^(s_j - s_{j-1}).
Coefficients ema_coefficients(size_t inputs, double decay);
Coefficients ema_coefficients(std::span<const int64_t> steps, double decay);

Coefficients lawa_coefficients(size_t inputs, size_t last);  ///< the mean of the last ones; 0 for the others

/// A learning rate's decay from 1 at the first input to the last: at u = (s - s_0) / (s_n - s_0), 1 - u, (1 + cos(pi u)) / 2, 1 - sqrt(u);
/// or sqrt(s_0 / s), which asks for a positive s_0.
enum class DecayCurve : uint8_t { kLinear, kCosine, kInvSqrt, kOneMinusSqrt };
std::optional<DecayCurve> find_decay_curve(std::string_view name) noexcept;  ///< "linear", "cosine", "inv-sqrt", "1-sqrt"

/// x_0 + sum of f_j (x_j - x_{j-1}), f_j the curve's mean from s_{j-1} to s_j: what a run would be that had taken the differences at that
/// learning rate. `steps` ascend strictly; they may count tokens.
Coefficients decay_coefficients(DecayCurve curve, std::span<const int64_t> steps);

// ---- inputs

/// What can be read like a checkpoint.
class MergeSource {
 public:
  virtual ~MergeSource() = default;
  virtual std::vector<std::string> names() const = 0;  ///< ascending
  virtual std::pair<DType, Shape> tensor(std::string_view name) const = 0;
  virtual void read(const TensorView& wanted) const = 0;  ///< a region of a tensor, in its own dtype, into host memory
  virtual bool one_at_a_time() const { return false; }    ///< else read() is called by several threads at once, anywhere
};

struct MergeInput {
  std::string name;  ///< for messages, for the header, and for the order of inputs with one step
  std::variant<Checkpoint, std::shared_ptr<const MergeSource>> tensors;
  double coefficient = 0;  ///< an input with 0 is not read
  std::optional<int64_t> step = {};
};

/// Of a checkpoint: what its metadata say (an EMA's state, an earlier merge), else what its path says: step-100, checkpoint_100,
/// iter_0000100, 100, the last such word of its last parts. Nothing where neither does.
std::optional<int64_t> step_of(const std::filesystem::path& path, const std::map<std::string, std::string>& metadata = {});

/// Ascending by (step, name) where every input has a step, else they stay as they are. Returns whether they have.
bool sort_by_step(std::vector<MergeInput>& inputs);

/// Throws kInvalidArgument, naming inputs without a step, or two with one step.
std::vector<int64_t> steps_of(std::span<const MergeInput> inputs);

// ---- merging

inline constexpr const char* kMergeKey = "shardow.merge";  ///< in the metadata of a file: version, formula, step, inputs, as JSON

struct MergeOptions {
  std::optional<DType> dtype = {};  ///< of floating tensors; by default their own, which must be the same in all inputs then
  int64_t max_shard_size = 0;       ///< bytes per file; 0: one file
  std::map<std::string, std::string> metadata = {};  ///< into the header, beside ours
  std::string formula = {};                          ///< how the coefficients came about, into the header
  bool verify = true;                                ///< check inputs' checksums where they carry them; costs no extra reads
  bool check_only = false;                           ///< compare names, shapes and dtypes, and read no data
  int threads = 4;
  std::chrono::milliseconds timeout{600'000};  ///< without progress of any rank
  ProgressFn progress = {};                    ///< in bytes of the output
  const Environment* environment = nullptr;    ///< for tests
};

struct MergeReport {
  struct Input {
    std::string name;
    std::optional<int64_t> step;
    double coefficient;
  };
  std::vector<Input> inputs;          ///< those that take part, in the order in which they are added
  double sum = 0;                     ///< of the coefficients
  std::vector<std::string> averaged;  ///< tensors, ascending
  std::vector<std::string> taken;     ///< integers and booleans, which are those of the newest input: the last of `inputs`
  std::vector<std::filesystem::path> files;
  int64_t bytes_read = 0, bytes_written = 0;  ///< by this rank
  double seconds = 0;
};

/// Collective: every rank gives the same inputs and writes its own bytes. Publishes as save() does. Throws kInvalidArgument before anything
/// is written, with all that does not fit: names, shapes, dtypes; kUnsupported for element types below 16 bits, which are not averaged;
/// kCorrupt, before anything is published, where an input's bytes are not what was saved. Memory: a few chunks for each thread.
MergeReport merge(Group& group, std::vector<MergeInput> inputs, const std::filesystem::path& path, const MergeOptions& options = {});

/// The same sums into tensors, as load() does: each rank reads its bytes of the inputs, and nothing is written. `verify` is what the
/// options of the load say.
LoadReport load_merged(Group& group, std::span<const TensorView> tensors, std::vector<MergeInput> inputs, const LoadOptions& options = {});

}  // namespace shardow
#pragma GCC visibility pop
