// LibTorch, which you link: views of a module's weights, named as Python's state_dict(), and the Group of a c10d store.
//
// After module.to(...) make views anew and ema.bind() them. `stream`: the cudaStream_t. Throws kUnsupported for strides
// that are not row-major, sparse tensors and overlaps.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <span>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "shardow/average.h"
#include "shardow/group.h"

namespace shardow::libtorch {

enum class Params { kTrainable, kAll };  ///< kTrainable: requires_grad

/// For an Average; tied weights by their first name.
std::vector<TensorView> parameters(const torch::nn::Module& module, Params which = Params::kTrainable,
                                   void* stream = nullptr);

/// To save, not to average: some are integers.
std::vector<TensorView> buffers(const torch::nn::Module& module, void* stream = nullptr);

/// Parameters and buffers, with `averages` in place of their weights. `others` gets further names of tied weights, with
/// the first.
std::vector<TensorView> state(const torch::nn::Module& module, std::span<const TensorView> averages = {},
                              void* stream = nullptr, std::map<std::string, std::string>* others = nullptr);

/// As shardow::Swapped; calls written().
class Swapped {
 public:
  [[nodiscard]] Swapped(const torch::nn::Module& module, Average& ema, size_t k = 0);
  ~Swapped();

  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

 private:
  const std::vector<at::Tensor> weights_;
  std::optional<shardow::Swapped> swapped_;
};

/// After load(), swap_in(), swap_out(): autograd then refuses a backward through old values.
void written(const torch::nn::Module& module);

/// Of the ranks that share a c10d store.
std::unique_ptr<Group> group(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

/// Of a torch::OrderedDict.
template <typename Named>
std::vector<TensorView> views(const Named& tensors, void* stream = nullptr,
                              std::map<std::string, std::string>* others = nullptr);

TensorView view(const std::string& name, const at::Tensor& tensor, void* stream = nullptr);

/// The part `region` of a global tensor.
TensorView view(const std::string& name, const at::Tensor& local, Region region, void* stream = nullptr);

DType dtype_of(std::string_view name, at::ScalarType type);

}  // namespace shardow::libtorch

#include "shardow/detail/libtorch.h"
