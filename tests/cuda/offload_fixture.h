// For tests of averages on the host: the same training twice, with weights on a device of the fake driver and averages
// on the host, and all of it on the host.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "average/driver.h"
#include "fake.h"
#include "kernels/cuda.h"
#include "shardow/average.h"
#include "shardow/error.h"
#include "tensor/dtype.h"

namespace shardow {

inline void* stream_of(int device, int number = 1) {
  return fake::stream(device, number);
}

/// One tensor of a model.
struct Spec {
  std::string name;
  DType dtype;
  Region region;
  int device = 0;
};

/// Regions of every kind: whole, empty, scalar, a flat window, a column shard, a box of one.
inline std::vector<Spec> model(DType dtype, int num_devices = 1) {
  const Region columns = Region::grid({37, 11}, {{{0, 37}}, {{2, 7}}});
  const std::vector<Region> regions = {Region::whole({40, 11}),
                                       Region::whole({0, 4}),
                                       Region::whole({}),
                                       Region::whole({3000}).window(700, 2011),
                                       columns,
                                       columns.window(31, 150),
                                       Region::whole({2, 3, 5}),
                                       Region::grid({6, 9, 5}, {{{1, 2}, {4, 6}}, {{0, 3}, {5, 9}}, {{1, 4}}})};
  std::vector<Spec> specs;
  for (size_t i = 0; i < regions.size(); ++i)
    specs.push_back({"p" + std::to_string(i), dtype, regions[i], static_cast<int>(i) % num_devices});
  return specs;
}

inline AverageOptions options_of(size_t num_decays, int64_t ring_bytes) {
  AverageOptions options;
  options.schedules.clear();
  for (size_t k = 0; k < num_decays; ++k)
    options.schedules.push_back(Schedule::constant(k == 0 ? 0.9 : k == 1 ? 0.99999 : 0.3));
  options.ring_bytes = ring_bytes;
  options.seed = 7;
  return options;
}

inline constexpr int64_t kRings[] = {4096, 10000, 1 << 20};
using Bytes = std::vector<std::byte>;

/// Finite values of a dtype, of any magnitude that arithmetic likes.
inline Bytes draw(const Spec& spec, std::mt19937_64& random) {
  Bytes bytes(static_cast<size_t>(byte_size(spec.dtype, spec.region.size())));
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(byte_size(spec.dtype, 1))) {
    const auto value = static_cast<float>(random() % 2000001) * 1e-6f - 1.0f;
    const double wide = value;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const auto upper = static_cast<uint16_t>(bits >> 16),
               half = static_cast<uint16_t>(0x3000 + random() % 0x800 + (random() % 2) * 0x8000);
    switch (spec.dtype) {
      case DType::kF32: std::memcpy(&bytes[at], &value, 4); break;
      case DType::kF64: std::memcpy(&bytes[at], &wide, 8); break;
      case DType::kBF16: std::memcpy(&bytes[at], &upper, 2); break;
      default: std::memcpy(&bytes[at], &half, 2);
    }
  }
  return bytes;
}

inline Bytes bytes_of(const TensorView& view) {
  const auto* const data = static_cast<const std::byte*>(view.data);
  return {data, data + byte_size(view.dtype, view.region.size())};
}

/// Memory for K averages of each of `parameters`, on the host.
struct Averages {
  std::vector<std::vector<Bytes>> memory;
  std::vector<std::vector<TensorView>> views;

  /// Those of `beside` lie on their parameter's device.
  Averages(const std::vector<TensorView>& parameters, size_t count, DType dtype, const std::vector<size_t>& beside = {})
      : memory(count), views(count) {
    for (size_t k = 0; k < count; ++k) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        const bool there = std::find(beside.begin(), beside.end(), i) != beside.end();
        memory[k].emplace_back(static_cast<size_t>(byte_size(dtype, parameters[i].region.size())) + 64);
        views[k].push_back({parameters[i].name, dtype, parameters[i].region, memory[k].back().data(),
                            there ? parameters[i].device : Device{}});
      }
    }
  }
};

/// Tensors, by their index: weights that stay on the host, averages that stay beside their weights.
struct Exceptions {
  std::vector<size_t> on_host = {}, beside = {};
};

/// Weights on devices, and the same on the host.
class Twins {
 public:
  Twins(std::vector<Spec> specs, const AverageOptions& options, uint64_t seed = 1, const Exceptions& exceptions = {})
      : specs_(std::move(specs)), random_(seed), there_(weights(true, exceptions.on_host)), here_(weights(false, {})) {
    fill();
    averages_ = std::make_unique<Averages>(there_, options.schedules.size(), options.dtype, exceptions.beside);
    expected_ = std::make_unique<Averages>(here_, options.schedules.size(), options.dtype);
    offloaded = std::make_unique<Average>(there_, averages_->views, options);
    AverageOptions plain = options;
    plain.overlap = false;
    resident = std::make_unique<Average>(here_, expected_->views, plain);
  }
  ~Twins() {
    offloaded.reset();
    for (const auto& [memory, device] : allocated_) kernels::cuda::release(memory, device);
  }

  /// An optimizer's step on the devices' streams, behind all that they have to do; and on the host.
  void step() {
    offloaded->finish_reading();
    fill();
  }

  /// The same by one who does not ask whether the weights are still read.
  void step_anew() { fill(); }

  /// One element of a float32 tensor is NaN.
  void poison(size_t tensor, size_t element) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    Bytes bytes(sizeof nan);
    std::memcpy(bytes.data(), &nan, sizeof nan);
    write(tensor, 4 * element, bytes);
  }

  void use_stream(int device, void* stream) {
    offloaded->set_stream(device, stream);
    for (TensorView& view : there_) {
      if (view.device.index == device) view.device.stream = stream;
    }
  }

  void update() {
    offloaded->update();
    resident->update();
  }

  /// The weights to memory elsewhere.
  void move() {
    fake::synchronize();
    for (TensorView& view : there_) {
      const Bytes values = bytes_of(view);
      view.data = allocate(values.size(), view.device.index);
      if (!values.empty()) std::memcpy(view.data, values.data(), values.size());
    }
    offloaded->bind(there_);
  }

  bool equal() {
    for (size_t k = 0; k < resident->size(); ++k) {
      for (size_t i = 0; i < here_.size(); ++i) {
        if (bytes_of(offloaded->views(k)[i]) != bytes_of(resident->views(k)[i])) return false;
      }
    }
    return true;
  }

  void expect_equal(const std::string& what = "") {
    offloaded->wait();
    fake::synchronize();  // averages beside their weights
    for (size_t k = 0; k < resident->size(); ++k) {
      const auto found = offloaded->views(k), wanted = resident->views(k);
      for (size_t i = 0; i < wanted.size(); ++i) {
        ASSERT_TRUE(bytes_of(found[i]) == bytes_of(wanted[i])) << what << ": average " << k << " of " << wanted[i].name;
      }
    }
    expect_equal_weights(what);
  }

  void expect_equal_weights(const std::string& what = "") {
    fake::synchronize();
    for (size_t i = 0; i < here_.size(); ++i)
      ASSERT_TRUE(bytes_of(there_[i]) == bytes_of(here_[i])) << what << ": " << here_[i].name;
  }

  /// The averages, the weights with the k-th ones swapped in, and the way back.
  void expect_equal_through_a_swap(size_t k) {
    expect_equal();
    offloaded->swap_in(k);
    resident->swap_in(k);
    expect_equal_weights();
    offloaded->swap_out();
    resident->swap_out();
  }

  int64_t weight_bytes() const {
    int64_t bytes = 0;
    for (const TensorView& view : here_) bytes += byte_size(view.dtype, view.region.size());
    return bytes;
  }

  const std::vector<TensorView>& there() const { return there_; }
  const std::vector<TensorView>& here() const { return here_; }

  std::unique_ptr<Average> offloaded, resident;

 private:
  void* allocate(size_t bytes, int device) {
    allocated_.emplace_back(kernels::cuda::allocate(bytes + 1, device), device);
    return allocated_.back().first;
  }

  std::vector<TensorView> weights(bool on_devices, const std::vector<size_t>& on_host) {
    std::vector<TensorView> views;
    for (const Spec& spec : specs_) {
      const bool on_device = on_devices && std::find(on_host.begin(), on_host.end(), views.size()) == on_host.end();
      const auto bytes = static_cast<size_t>(byte_size(spec.dtype, spec.region.size()));
      void* data = nullptr;
      if (on_device) data = allocate(bytes, spec.device);
      if (!on_device) data = host_.emplace_back(bytes + 1).data();
      const Device device = on_device ? Device{Device::Kind::kCuda, spec.device, stream_of(spec.device)} : Device{};
      views.push_back({spec.name, spec.dtype, spec.region, data, device});
    }
    return views;
  }

  void fill() {
    for (size_t i = 0; i < specs_.size(); ++i) write(i, 0, draw(specs_[i], random_));
  }

  void write(size_t tensor, size_t at, const Bytes& values) {
    if (values.empty()) return;
    const auto to = [at](const TensorView& view) { return static_cast<std::byte*>(view.data) + at; };
    std::memcpy(to(here_[tensor]), values.data(), values.size());
    const TensorView& view = there_[tensor];
    if (view.device.kind == Device::Kind::kCpu) {
      std::memcpy(to(view), values.data(), values.size());
    } else {
      fake::enqueue(view.device.index, view.device.stream,
                    [to = to(view), values] { std::memcpy(to, values.data(), values.size()); });
    }
  }

  std::vector<Spec> specs_;
  std::mt19937_64 random_;
  std::vector<std::pair<void*, int>> allocated_;
  std::vector<Bytes> host_;
  std::vector<TensorView> there_, here_;
  std::unique_ptr<Averages> averages_, expected_;
};

template <typename Fn>
std::string error_of(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace shardow
