// What a random program is drawn from: options, weights and where they lie.
#include <algorithm>
#include <cstring>

#include "fake.h"
#include "kernels/cuda.h"
#include "program.h"

namespace shardow::testing {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

bool is_narrow(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16;
}

template <size_t kSize>
int64_t one_of(const int64_t (&choices)[kSize], std::mt19937_64& random) {
  return choices[random() % kSize];
}

}  // namespace

void Program::choose_decays() {
  options_.schedules.clear();
  for (uint64_t k = 1 + random_() % 3; k > 0; --k) {
    const Schedule choices[] = {Schedule::constant(0.9), Schedule::constant(0.99999), Schedule::constant(0.3),
                                Schedule::tf_warmup(0.999)};
    options_.schedules.push_back(choices[random_() % std::size(choices)]);
  }
}

void Program::choose() {
  offloaded_ = missing_ != Missing::kNothing || random_() % 3 != 0;
  num_devices_ = 1 + static_cast<int>(random_() % 2);
  faulty_ = missing_ == Missing::kNothing && may_fail_ && random_() % 3 == 0;
  choose_decays();
  options_.dtype = random_() % 2 == 0 ? DType::kF32 : kDTypes[random_() % 4];
  options_.rule = is_narrow(options_.dtype) ? Rule::kLerp : static_cast<Rule>(random_() % 6);
  if (is_narrow(options_.dtype) ||
      (options_.dtype == DType::kF32 && options_.rule == Rule::kLerp && random_() % 3 == 0))
    options_.rounding = Rounding::kStochastic;
  options_.non_finite = random_() % 4 == 0 ? NonFinite::kPropagate : NonFinite::kHold;
  options_.update_every = random_() % 4 == 0 ? 2 : 1;
  options_.start_step = random_() % 4 == 0 ? 2 : 0;
  options_.seed = random_();
  options_.num_threads = random_() % 8 == 0 ? 2 : 1;
  options_.ring_bytes = one_of({4096, 8192, 20000, 1 << 20}, random_);
  const bool mixed = random_() % 3 == 0;
  const DType dtype = kDTypes[random_() % 4];
  for (uint64_t i = 0, count = 1 + random_() % 5; i < count; ++i) {
    const int64_t rows = one_of({0, 1, 3, 7, 50, 200}, random_), columns = one_of({1, 5, 11, 16}, random_);
    Region region = Region::whole({rows, columns});
    if (rows > 2 && columns > 4 && random_() % 3 == 0) region = Region::grid({rows, columns}, {{{0, rows}}, {{2, 5}}});
    if (rows > 2 && random_() % 4 == 0) region = Region::whole({rows, columns}).window(1, rows * columns - 1);
    here_.push_back({"p" + std::to_string(i), mixed ? kDTypes[random_() % 4] : dtype, region, nullptr, {}});
  }
}

void* Program::device_memory(size_t bytes, int device) {
  call([&] { allocated_.emplace_back(kernels::cuda::allocate(bytes + 1, device), device); });
  return allocated_.back().first;
}

/// Values of a weight: most in (-1, 1), now and then one that is not finite.
Program::Bytes Program::draw(const TensorView& view) {
  Bytes bytes(size_of(view));
  const auto width = static_cast<size_t>(byte_size(view.dtype, 1));
  const bool wild = random_() % 16 == 0;
  for (size_t at = 0; at < bytes.size(); at += width) {
    double wide = static_cast<double>(random_() % 2000001) * 1e-6 - 1.0;
    if (wild && random_() % 64 == 0) wide = random_() % 2 == 0 ? HUGE_VAL : std::nan("");
    const auto value = static_cast<float>(wide);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    auto half = static_cast<uint16_t>(view.dtype == DType::kBF16 ? bits >> 16
                                                                 : 0x3000 + random_() % 0x800 + random_() % 2 * 0x8000);
    if (view.dtype == DType::kF16 && (bits & 0x7f800000) == 0x7f800000) half = 0x7c00;
    if (width == 8) std::memcpy(&bytes[at], &wide, 8);
    if (width == 4) std::memcpy(&bytes[at], &value, 4);
    if (width == 2) std::memcpy(&bytes[at], &half, 2);
  }
  return bytes;
}

void Program::make() {
  there_ = here_;
  for (size_t i = 0; i < here_.size(); ++i) {
    here_[i].data = host_.emplace_back(std::make_unique<Bytes>(size_of(here_[i]) + 1))->data();
    const int device = static_cast<int>(i) % num_devices_;
    there_[i].data = device_memory(size_of(there_[i]), device);
    there_[i].device = {Device::Kind::kCuda, device, stream_of(device, 1)};
  }
  write_weights();
  std::vector<std::vector<TensorView>> averages(options_.schedules.size());
  for (auto& of_one : averages) {
    for (const TensorView& weight : there_) {
      TensorView& average = of_one.emplace_back(weight);
      average.dtype = options_.dtype;
      if (offloaded_) average.device = {};
      average.data = offloaded_ ? host_.emplace_back(std::make_unique<Bytes>(size_of(average) + 1))->data()
                                : device_memory(size_of(average), weight.device.index);
    }
  }
  arm();
  call([&] { tested_ = std::make_unique<Average>(there_, averages, options_); });
  oracle_ = std::make_unique<Average>(here_, options_);
  before_ = averages_of_oracle();
}

}  // namespace shardow::testing
