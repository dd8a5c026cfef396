// How shardow/libtorch.h, which alone includes this, does what it says. Nothing here is public.
#pragma once

#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "shardow/average.h"
#include "shardow/error.h"
#include "shardow/group.h"
#include "shardow/libtorch.h"
#include "shardow/store.h"
#include "shardow/tensor_view.h"

namespace shardow::libtorch {

inline DType dtype_of(std::string_view name, at::ScalarType type) {
  switch (type) {
    case at::kBool: return DType::kBool;
    case at::kByte: return DType::kU8;
    case at::kChar: return DType::kI8;
    case at::kShort: return DType::kI16;
    case at::kUInt16: return DType::kU16;
    case at::kInt: return DType::kI32;
    case at::kUInt32: return DType::kU32;
    case at::kLong: return DType::kI64;
    case at::kUInt64: return DType::kU64;
    case at::kHalf: return DType::kF16;
    case at::kBFloat16: return DType::kBF16;
    case at::kFloat: return DType::kF32;
    case at::kDouble: return DType::kF64;
    case at::kComplexFloat: return DType::kC64;
    case at::kFloat8_e5m2: return DType::kF8E5M2;
    case at::kFloat8_e4m3fn: return DType::kF8E4M3;
    case at::kFloat8_e5m2fnuz: return DType::kF8E5M2Fnuz;
    case at::kFloat8_e4m3fnuz: return DType::kF8E4M3Fnuz;
    default:
      throw Error(Code::kUnsupported,
                  c10::str("'", name, "' is ", type, ", which has no element type here; leave it out"));
  }
}

inline TensorView view(const std::string& name, const at::Tensor& local, Region region, void* stream) {
  const auto refuse = [&](Code code, const auto&... words) { throw Error(code, c10::str("'", name, "' ", words...)); };
  if (!local.defined()) refuse(Code::kInvalidArgument, "is an undefined tensor");
  if (local.layout() != at::kStrided)
    refuse(Code::kUnsupported, "is ", local.layout(), "; only ordinary (strided) tensors are taken");
  const DType dtype = dtype_of(name, local.scalar_type());
  if (!local.device().is_cpu() && !local.device().is_cuda())
    refuse(Code::kUnsupported, "is on ", local.device(), "; move the module to the CPU or a CUDA device first");
  if (!local.is_contiguous() || local.is_conj() || local.is_neg()) {
    refuse(Code::kUnsupported, "has sizes ", local.sizes(), " and strides ", local.strides(),
           ", which is not row-major: before the optimizer is made, tensor.set_data(tensor.contiguous()); or take() "
           "and place() its "
           "elements (shardow/copy.h)");
  }
  if (region.size() != local.numel())
    refuse(Code::kInvalidArgument, "has ", local.numel(), " elements, its region ", region.to_string(), " has ",
           region.size());
  Device device;
  if (local.is_cuda()) device = {Device::Kind::kCuda, local.get_device(), stream};
  return {name, dtype, std::move(region), local.data_ptr(), device};
}

inline TensorView view(const std::string& name, const at::Tensor& tensor, void* stream) {
  if (!tensor.defined()) throw Error(Code::kInvalidArgument, "'" + name + "' is an undefined tensor");
  return view(name, tensor, Region::whole(Shape(tensor.sizes().begin(), tensor.sizes().end())), stream);
}

template <typename Named>
std::vector<TensorView> views(const Named& tensors, void* stream, std::map<std::string, std::string>* others) {
  std::vector<TensorView> kept;
  std::map<std::pair<int, const char*>, std::pair<size_t, size_t>>
      memory;  // device and begin of each; which of `kept`, and its bytes
  const auto refuse_overlap = [](const std::string& one, const std::string& other) {
    throw Error(Code::kUnsupported, c10::str("'", one, "' and '", other,
                                             "' share memory and are not the same tensor; clone() one of them"));
  };
  for (const auto& item : tensors) {
    TensorView one = view(item.key(), item.value(), stream);
    const std::pair place{item.value().get_device(), static_cast<const char*>(one.data)};
    const auto [first, is_new] = memory.try_emplace(place, kept.size(), item.value().nbytes());
    if (is_new || item.value().numel() == 0) {
      kept.push_back(std::move(one));
      continue;
    }
    const TensorView& same = kept[first->second.first];
    if (same.dtype != one.dtype || same.region.shape() != one.region.shape()) refuse_overlap(same.name, one.name);
    if (others != nullptr) (*others)[one.name] = same.name;
  }
  for (auto at = memory.begin(); at != memory.end() && std::next(at) != memory.end(); ++at) {
    const auto after = std::next(at);
    if (at->first.first == after->first.first && at->first.second + at->second.second > after->first.second)
      refuse_overlap(kept[at->second.first].name, kept[after->second.first].name);
  }
  return kept;
}

inline std::vector<TensorView> parameters(const torch::nn::Module& module, Params which, void* stream) {
  torch::OrderedDict<std::string, at::Tensor> chosen;
  for (const auto& item : module.named_parameters()) {
    if (which == Params::kAll || item.value().requires_grad()) chosen.insert(item.key(), item.value());
  }
  return views(chosen, stream);
}

inline std::vector<TensorView> buffers(const torch::nn::Module& module, void* stream) {
  return views(module.named_buffers(), stream);
}

inline std::vector<TensorView> state(const torch::nn::Module& module, std::span<const TensorView> averages,
                                     void* stream, std::map<std::string, std::string>* others) {
  torch::OrderedDict<std::string, at::Tensor> all = module.named_parameters();
  all.update(module.named_buffers());
  std::vector<TensorView> whole = views(all, stream, others);
  std::map<std::string_view, TensorView*> by_name;
  for (TensorView& one : whole) by_name[one.name] = &one;
  for (const TensorView& average : averages) {
    const auto weight = by_name.find(average.name);
    if (weight == by_name.end())
      throw Error(Code::kInvalidArgument, "the module has no weight for the average '" + average.name + "'");
    TensorView put = average;
    std::swap(*weight->second, put);
  }
  return whole;
}

namespace detail {

inline void bump(std::span<const at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

class C10dStore final : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    asked([&] { store_->set(key, value); });
  }
  /// Asks again and again, later and later: a wait of the store's own would hold its connection, and warn at every
  /// deadline.
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    const auto begin = std::chrono::steady_clock::now();
    while (!check(key)) {
      const auto now = std::chrono::steady_clock::now();
      if (now >= deadline) return std::nullopt;
      const auto pause = std::clamp<std::chrono::steady_clock::duration>((now - begin) / 8, kLeastPause, kMostPause);
      std::this_thread::sleep_until(std::min(deadline, now + pause));
    }
    const std::vector<uint8_t> bytes = asked([&] { return store_->get(key); });
    return std::string(bytes.begin(), bytes.end());
  }
  bool check(const std::string& key) override {
    return asked([&] { return store_->check({key}); });
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return asked([&] { return store_->add(key, amount); });
  }
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    return asked([&] { return store_->compareSet(key, expected, desired); });
  }
  void append(const std::string& key, const std::string& value) override {
    if (!store_->hasExtendedApi()) return Store::append(key, value);
    asked([&] { store_->append(key, std::vector<uint8_t>(value.begin(), value.end())); });
  }
  void erase(const std::string& key) override {
    asked([&] { store_->deleteKey(key); });
  }

 private:
  template <typename Fn>
  static auto asked(const Fn& fn) -> decltype(fn()) {
    try {
      return fn();
    } catch (const c10::Error& error) {
      throw Error(Code::kPeerFailed,
                  c10::str("the ranks' store is gone, and with it who kept it: ", error.what_without_backtrace()));
    }
  }

  static constexpr std::chrono::microseconds kLeastPause{50}, kMostPause{100'000};
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace detail

inline void written(const torch::nn::Module& module) {
  detail::bump(module.parameters());
  detail::bump(module.buffers());
}

inline Swapped::Swapped(const torch::nn::Module& module, Average& ema, size_t k) : weights_(module.parameters()) {
  swapped_.emplace(ema, k);
  detail::bump(weights_);
}

inline Swapped::~Swapped() {
  swapped_.reset();
  detail::bump(weights_);
}

inline std::unique_ptr<Group> group(c10::intrusive_ptr<c10d::Store> store, int rank, int size) {
  return store_group(std::make_unique<detail::C10dStore>(std::move(store)), rank, size);
}

}  // namespace shardow::libtorch
