// LibTorch: views of a module's weights, and the Group of a c10d store. Link LibTorch with it.
//
//   namespace lt = shardow::libtorch;
//   shardow::Average ema(lt::parameters(*model), {.schedules = {shardow::Schedule::constant(0.999)}});
//   optimizer.step();
//   ema.update();
//   { const lt::Swapped swapped(*model, ema); evaluate(model); }
//
// Names are those of Python's state_dict(). After module.to(...) make views anew, and ema.bind() them. `stream` is the cudaStream_t of CUDA
// tensors. Throws kUnsupported for strides that are not row-major, sparse tensors and overlaps.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shardow/average.h"
#include "shardow/group.h"
#include "shardow/tensor_view.h"

namespace shardow::libtorch {

enum class Params { kTrainable, kAll };  ///< kTrainable: those that require a gradient

/// For an Average. Tied weights have their first name alone.
std::vector<TensorView> parameters(const torch::nn::Module& module, Params which = Params::kTrainable, void* stream = nullptr);

/// Some are integers: to save, not to average.
std::vector<TensorView> buffers(const torch::nn::Module& module, void* stream = nullptr);

/// Parameters and buffers, to save and load; `averages` stand in place of their weights. `others` gets further names of tied weights, with
/// the first.
std::vector<TensorView> state(const torch::nn::Module& module, std::span<const TensorView> averages = {}, void* stream = nullptr,
                              std::map<std::string, std::string>* others = nullptr);

/// As shardow::Swapped; autograd sees that weights were written.
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

/// Call it after load(), swap_in() and swap_out(): autograd then refuses a backward through old values.
void written(const torch::nn::Module& module);

/// The ranks that share a c10d store, such as those of a ProcessGroup.
std::unique_ptr<Group> group(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

// ---- Tensors in no module, and sharded weights

/// Of a torch::OrderedDict; tied ones as in state().
template <typename Named>
std::vector<TensorView> views(const Named& tensors, void* stream = nullptr, std::map<std::string, std::string>* others = nullptr);

TensorView view(const std::string& name, const at::Tensor& tensor, void* stream = nullptr);  ///< all of it

/// `local` as the part `region` of a global tensor.
TensorView view(const std::string& name, const at::Tensor& local, Region region, void* stream = nullptr);

DType dtype_of(std::string_view name, at::ScalarType type);  ///< `name` is for messages

}  // namespace shardow::libtorch

#include "shardow/detail/libtorch.h"
