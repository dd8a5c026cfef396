// Weighted sums of checkpoints, in float64, rounded once: the same bytes on any ranks and threads. Formulas:
// docs/merging.md.
#pragma once

#include <span>
#include <variant>

#include "shardow/checkpoint.h"

#pragma GCC visibility push(default)
namespace shardow {

/// What can be read like a checkpoint.
class MergeSource {
 public:
  virtual ~MergeSource() = default;
  virtual std::vector<std::string> names() const = 0;  ///< ascending
  virtual std::pair<DType, Shape> tensor(std::string_view name) const = 0;
  virtual void read(const TensorView& wanted) const = 0;  ///< in the tensor's dtype
  virtual bool one_at_a_time() const { return false; }    ///< true: read() by one thread at a time
};

struct MergeInput {
  std::string name;
  std::variant<Checkpoint, std::shared_ptr<const MergeSource>> tensors;
  double coefficient = 0;  ///< by weigh()

  std::optional<int64_t> step = {};
  bool newest = false;  ///< integers and metadata are its; else the last's
};

/// Of metadata, else of its path: step-100.
std::optional<int64_t> step_of(const std::filesystem::path& path,
                               const std::map<std::string, std::string>& metadata = {});

/// Of the learning rate, from the first step to the last.
enum class DecayCurve : uint8_t { kLinear, kCosine, kInvSqrt, kOneMinusSqrt };

struct MergeRule {
  enum class Kind : uint8_t {
    kUniform,
    kWeights,
    kEma,    ///< of the inputs in order, by `decay`
    kLawa,   ///< the mean of the `last` ones
    kCurve,  ///< as if the learning rate had decayed along `curve`
  };
  Kind kind = Kind::kUniform;
  std::vector<double> weights = {};
  bool normalize = false;  ///< weights
  double decay = 0;
  bool per_step = false;  ///< decay is one step's
  size_t last = 0;
  DecayCurve curve = DecayCurve::kLinear;
};

struct Coefficients {
  std::vector<double> values;
  std::string formula;
  std::optional<double> index_error = {};  ///< of weights by index
};

/// Sets coefficients and, but for kWeights, sorts by steps.
Coefficients weigh(std::vector<MergeInput>& inputs, const MergeRule& rule);

struct MergeOptions {
  std::optional<DType> dtype = {};  ///< of floating tensors; needed where inputs differ
  int64_t max_shard_size = 0;
  std::map<std::string, std::string> metadata = {};
  std::string formula = {};
  bool verify = true;
  bool check_only = false;  ///< read no data
  int threads = 4;          ///< up to 8
  std::chrono::milliseconds timeout{600'000};
  ProgressFn progress = {};
};

struct MergeReport {
  struct Input {
    std::string name;
    std::optional<int64_t> step;
    double coefficient;
  };
  std::vector<Input> inputs;
  double sum = 0;
  std::string newest;
  std::vector<std::string> averaged;
  std::vector<std::string> taken;  ///< the newest's integers
  std::vector<std::filesystem::path> files;
  int64_t bytes_read = 0, bytes_written = 0;
  double seconds = 0;
};

/// Collective, with the same inputs on every rank; saves as save(). Throws where a finite sum becomes infinite, and for
/// floats below 16 bits.
MergeReport merge(Group& group, std::vector<MergeInput> inputs, const std::filesystem::path& path,
                  const MergeOptions& options = {});

LoadReport load_merged(Group& group, std::span<const TensorView> tensors, std::vector<MergeInput> inputs,
                       const LoadOptions& options = {});

}  // namespace shardow
#pragma GCC visibility pop
