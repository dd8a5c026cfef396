// Averages after the fact: out = sum of c_j x_j over checkpoints, read once, in chunks, and written as every save is.
//
//   std::vector<MergeInput> inputs;
//   for (const char* name : {"step-100", "step-200"}) {
//     const Checkpoint one = Checkpoint::open(name);
//     inputs.push_back({.name = name, .tensors = one, .step = step_of(name, one.metadata())});
//   }
//   const Coefficients coefficients = weigh(inputs, {.kind = MergeRule::Kind::kCurve, .curve = DecayCurve::kLinear});
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

/// What can be read like a checkpoint.
class MergeSource {
 public:
  virtual ~MergeSource() = default;
  virtual std::vector<std::string> names() const = 0;  ///< ascending
  virtual std::pair<DType, Shape> tensor(std::string_view name) const = 0;
  virtual void read(const TensorView& wanted) const = 0;  ///< a region of a tensor, in its own dtype, into host memory
  virtual bool one_at_a_time() const { return false; }    ///< true: read() is for one thread at a time
};

struct MergeInput {
  std::string name;  ///< for messages, for the header, and for the order of inputs with one step
  std::variant<Checkpoint, std::shared_ptr<const MergeSource>> tensors;
  double coefficient = 0;  ///< an input with 0 is not read, unless it is the newest
  std::optional<int64_t> step = {};
  bool newest = false;  ///< whose integers, booleans and metadata a merge takes; where none is marked: the last by (step, name)
};

/// Of a checkpoint: what its metadata say (an EMA's state, an earlier merge), else what its path says: step-100, checkpoint_100,
/// iter_0000100, the last such word of its last parts, or a number that is its whole last part. Nothing where neither does.
std::optional<int64_t> step_of(const std::filesystem::path& path, const std::map<std::string, std::string>& metadata = {});

/// A learning rate's decay from 1 at the first input to the last: at u = (s - s_0) / (s_n - s_0), 1 - u, (1 + cos(pi u)) / 2, 1 - sqrt(u);
/// or sqrt(s_0 / s), which asks for a positive s_0.
enum class DecayCurve : uint8_t { kLinear, kCosine, kInvSqrt, kOneMinusSqrt };

/// How inputs x_0, x_1, ... are weighed.
struct MergeRule {
  enum class Kind : uint8_t {
    kUniform,  ///< their mean
    kWeights,  ///< by `weights`, whatever their sum
    kEma,      ///< e_0 = x_0, e_j = decay e_{j-1} + (1 - decay) x_j
    kLawa,     ///< the mean of the `last` ones
    kCurve,    ///< x_0 + sum of f_j (x_j - x_{j-1}), f_j the curve's mean between their steps: as if the learning rate had decayed
  };
  Kind kind = Kind::kUniform;
  std::vector<double> weights = {};  ///< in the order in which the inputs are given
  bool normalize = false;            ///< divides the weights by their sum
  double decay = 0;
  bool per_step = false;  ///< kEma: decay^(s_j - s_{j-1}), for steps s_j, in place of decay
  size_t last = 0;
  DecayCurve curve = DecayCurve::kLinear;
};

struct Coefficients {
  std::vector<double> values;
  std::string formula;  ///< in one line, for people and for the file's header
  /// Where steps matter: how far off, at most, the learning rate would be by index instead, in parts of its peak. 0 where evenly spaced.
  std::optional<double> index_error = {};
};

/// Gives inputs their coefficients. Puts them in the order of their steps where all have one, but for kWeights. kLawa, kCurve and per_step
/// throw kInvalidArgument for inputs without a step, or two with one step. kEma by input does where only some have steps; where none has it
/// takes them in the order in which they are given, and marks the last as the newest.
Coefficients weigh(std::vector<MergeInput>& inputs, const MergeRule& rule);

struct MergeOptions {
  std::optional<DType> dtype = {};  ///< of floating tensors; by default their own, which must be the same in all inputs then
  int64_t max_shard_size = 0;       ///< bytes per file; 0: one file
  std::map<std::string, std::string> metadata = {};  ///< into the header, beside ours
  std::string formula = {};                          ///< how the coefficients came about, into the header
  bool verify = true;                                ///< check inputs' checksums where they carry them; costs no extra reads
  bool check_only = false;                           ///< compare names, shapes and dtypes, and read no data
  int threads = 4;                                   ///< 8 of them at most work, with some 5 MiB each
  std::chrono::milliseconds timeout{600'000};        ///< without progress of any rank
  ProgressFn progress = {};                          ///< in bytes of the output
};

struct MergeReport {
  struct Input {
    std::string name;
    std::optional<int64_t> step;
    double coefficient;
  };
  std::vector<Input> inputs;          ///< those that take part, in the order in which they are added
  double sum = 0;                     ///< of the coefficients
  std::string newest;                 ///< whose integers, booleans and metadata the output has
  std::vector<std::string> averaged;  ///< tensors, ascending
  std::vector<std::string> taken;     ///< integers and booleans, which are the newest input's
  std::vector<std::filesystem::path> files;
  int64_t bytes_read = 0, bytes_written = 0;  ///< by this rank
  double seconds = 0;
};

/// Collective: every rank gives the same inputs and writes its own bytes. Publishes as save() does. Throws before anything is written:
/// kInvalidArgument, with all names, shapes and dtypes that do not fit; kUnsupported for element types below 16 bits. Before anything is
/// published: kCorrupt where an input's bytes are not what was saved; kInvalidArgument where a finite sum would be infinite in the output's
/// dtype. Memory: a few chunks for each thread.
MergeReport merge(Group& group, std::vector<MergeInput> inputs, const std::filesystem::path& path, const MergeOptions& options = {});

/// The same sums into tensors, as load() does: each rank reads its bytes of the inputs, and nothing is written. `verify` is what the
/// options of the load say.
LoadReport load_merged(Group& group, std::span<const TensorView> tensors, std::vector<MergeInput> inputs, const LoadOptions& options = {});

}  // namespace shardow
#pragma GCC visibility pop
