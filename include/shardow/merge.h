// Weighted sums of checkpoints, read once, in chunks.
//
//   std::vector<MergeInput> inputs;
//   for (const char* name : {"step-100", "step-200"}) {
//     const Checkpoint one = Checkpoint::open(name);
//     inputs.push_back({.name = name, .tensors = one, .step = step_of(name, one.metadata())});
//   }
//   const Coefficients coefficients = weigh(inputs, {.kind = MergeRule::Kind::kCurve, .curve = DecayCurve::kLinear});
//   merge(*solo(), inputs, "merged", {.formula = coefficients.formula});
//
// Summed in float64 and rounded once: the same bytes on any ranks and threads. Formulas and sources: docs/merging.md.
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
  virtual void read(const TensorView& wanted) const = 0;  ///< in the tensor's own dtype
  virtual bool one_at_a_time() const { return false; }    ///< true: one thread at a time may read()
};

struct MergeInput {
  std::string name;  ///< for messages and headers
  std::variant<Checkpoint, std::shared_ptr<const MergeSource>> tensors;
  double coefficient = 0;  ///< weigh() sets it

  std::optional<int64_t> step = {};
  bool newest = false;  ///< take its integers and metadata; else the last's
};

/// Of a checkpoint's metadata, else of its path: step-100, iter_0000100, 100.
std::optional<int64_t> step_of(const std::filesystem::path& path, const std::map<std::string, std::string>& metadata = {});

/// Learning rates from the first step to the last, u from 0 to 1: 1 - u, (1 + cos(pi u)) / 2, sqrt(first / step), 1 - sqrt(u).
enum class DecayCurve : uint8_t { kLinear, kCosine, kInvSqrt, kOneMinusSqrt };

/// Of inputs x_j.

struct MergeRule {
  enum class Kind : uint8_t {
    kUniform,  ///< their mean
    kWeights,  ///< by `weights`
    kEma,      ///< e_0 = x_0, e_j = decay e_{j-1} + (1 - decay) x_j
    kLawa,     ///< the mean of the `last` ones
    kCurve,    ///< x_0 + sum of f_j (x_j - x_{j-1}), f_j the curve's mean between their steps
  };
  Kind kind = Kind::kUniform;
  std::vector<double> weights = {};  ///< in the inputs' order
  bool normalize = false;            ///< weights by their sum
  double decay = 0;
  bool per_step = false;  ///< kEma: decay is that of one step
  size_t last = 0;
  DecayCurve curve = DecayCurve::kLinear;
};

struct Coefficients {
  std::vector<double> values;
  std::string formula;                     ///< in one line
  std::optional<double> index_error = {};  ///< of weighing by index instead: docs/merging.md
};

/// Sets the inputs' coefficients, and sorts them by steps, but for kWeights. Throws where the rule needs steps that are missing or equal.
Coefficients weigh(std::vector<MergeInput>& inputs, const MergeRule& rule);

struct MergeOptions {
  std::optional<DType> dtype = {};  ///< of floating tensors; needed where the inputs' differ
  int64_t max_shard_size = 0;       ///< bytes per file; 0: one file
  std::map<std::string, std::string> metadata = {};
  std::string formula = {};  ///< for the header
  bool verify = true;        ///< inputs' checksums
  bool check_only = false;   ///< compare all but data
  int threads = 4;           ///< of 5 MiB each; at most 8
  std::chrono::milliseconds timeout{600'000};
  ProgressFn progress = {};  ///< in bytes of the output
};

struct MergeReport {
  struct Input {
    std::string name;
    std::optional<int64_t> step;
    double coefficient;
  };
  std::vector<Input> inputs;  ///< those read, in order
  double sum = 0;             ///< of coefficients
  std::string newest;
  std::vector<std::string> averaged;  ///< tensors
  std::vector<std::string> taken;     ///< the newest's integers
  std::vector<std::filesystem::path> files;
  int64_t bytes_read = 0, bytes_written = 0;  ///< by this rank
  double seconds = 0;
};

/// Collective, with the same inputs on every rank; saves as save() does. Throws where names, shapes or dtypes do not fit, with all of them,
/// or a finite sum would become infinite; kUnsupported for element types below 16 bits.
MergeReport merge(Group& group, std::vector<MergeInput> inputs, const std::filesystem::path& path, const MergeOptions& options = {});

/// Into tensors, as load() does.
LoadReport load_merged(Group& group, std::span<const TensorView> tensors, std::vector<MergeInput> inputs, const LoadOptions& options = {});

}  // namespace shardow
#pragma GCC visibility pop
