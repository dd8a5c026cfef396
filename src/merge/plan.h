// What a merge adds up: inputs in their canonical order, tensors, and whether all of it fits. The same on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "merge/rules.h"

namespace shardow::merging {

/// One tensor of the output, and where it is in the inputs.
struct Tensor {
  std::string name;
  Shape shape;
  DType dtype;               ///< of the output
  bool averaged;             ///< else it is the newest input's
  std::vector<DType> types;  ///< by input
};

class Plan {
 public:
  /// Throws kInvalidArgument, with everything that does not fit, or kUnsupported.
  Plan(std::vector<MergeInput> inputs, std::optional<DType> dtype);

  /// In the order in which they are added: those with a coefficient, and the newest, which may have none.
  const std::vector<MergeInput>& inputs() const { return inputs_; }
  size_t newest() const { return newest_; }  ///< among them
  /// Whether an input's bytes of a tensor are read.
  bool reads(size_t input, const Tensor& tensor) const {
    return tensor.averaged ? inputs_[input].coefficient != 0 : input == newest_;
  }
  const std::vector<Tensor>& tensors() const { return tensors_; }  ///< ascending by name

  std::optional<size_t> find(std::string_view name) const;
  std::string provenance(const std::string& formula) const;  ///< the JSON under kMergeKey
  MergeReport report() const;
  int threads(int wanted) const;  ///< that may read the inputs

 private:
  void add(std::string_view name, std::vector<std::string>& unfit, std::vector<std::string>& unsupported);

  std::vector<MergeInput> inputs_;
  size_t newest_ = 0;
  std::optional<DType> dtype_;
  std::vector<Tensor> tensors_;
};

}  // namespace shardow::merging
