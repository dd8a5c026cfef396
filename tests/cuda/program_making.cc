// What a random program is drawn from: options, weights and where they lie.
#include <algorithm>
#include <cmath>
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

void Program::choose() {
  num_devices_ = 1 + static_cast<int>(random_() % 2);
  first_device_ = num_devices_ == 1 ? static_cast<int>(random_() % 2) : 0;
  faulty_ = missing_ == Missing::kNothing && may_fail_ && one_in(3);
  options_.schedules.clear();
  for (uint64_t k = 1 + random_() % 3; k > 0; --k) {
    const Schedule choices[] = {Schedule::constant(0.9), Schedule::constant(0.99999), Schedule::constant(0.3),
                                Schedule::tf_warmup(0.999)};
    options_.schedules.push_back(choices[random_() % std::size(choices)]);
  }
  options_.dtype = one_in(2) ? DType::kF32 : kDTypes[random_() % 4];
  options_.rule = is_narrow(options_.dtype) || one_in(2) ? Rule::kLerp : static_cast<Rule>(random_() % 6);
  if (is_narrow(options_.dtype) || (options_.dtype == DType::kF32 && options_.rule == Rule::kLerp && one_in(3)))
    options_.rounding = Rounding::kStochastic;
  options_.non_finite = one_in(4) ? NonFinite::kPropagate : NonFinite::kHold;
  options_.update_every = one_in(4) ? 2 : 1;
  options_.start_step = one_in(4) ? 2 : 0;
  options_.seed = random_();
  options_.num_threads = one_in(8) ? 2 : 1;
  options_.ring_bytes = one_of({4096, 8192, 20000, 1 << 20}, random_);
  choose_weights();
  const bool together = std::count(places_.begin(), places_.end(), places_[0]) == std::ssize(places_);
  if (!faulty_ && together && one_in(8)) options_.non_finite = NonFinite::kRaise;
  const bool beside = has(Place::kBeside);
  options_.overlap = !beside && missing_ == Missing::kNothing && one_in(6);
}

void Program::choose_weights() {
  const uint64_t kind = missing_ != Missing::kNothing ? 2 : random_() % 6;  // beside, offloaded, or mixed
  const bool mixed = one_in(3);
  const DType dtype = kDTypes[random_() % 4];
  for (uint64_t i = 0, count = 1 + random_() % 5; i < count; ++i) {
    const int64_t rows = one_of({0, 1, 3, 7, 50, 200}, random_), columns = one_of({1, 5, 11, 16}, random_);
    Region region = Region::whole({rows, columns});
    if (rows > 2 && columns > 4 && one_in(3)) region = Region::grid({rows, columns}, {{{0, rows}}, {{2, 5}}});
    if (rows > 2 && one_in(4)) region = Region::whole({rows, columns}).window(1, rows * columns - 1);
    if (rows == 1) region = Region::grid({6, 9, 5}, {{{1, 2}, {4, 6}}, {{0, 3}, {5, 9}}, {{1, 4}}});
    if (rows == 1 && columns == 1)
      region = one_in(8) ? Region::whole({100, 1501}).window(7, 149000) : Region::whole({});
    specs_.push_back({"p" + std::to_string(i), mixed ? kDTypes[random_() % 4] : dtype, region, nullptr, {}});
    places_.push_back(kind < 2 ? Place::kBeside : kind < 4 ? Place::kOffloaded : static_cast<Place>(random_() % 3));
  }
}

void* Program::device_memory(size_t bytes, int device) {
  void* memory = nullptr;
  call([&] { memory = kernels::cuda::allocate(bytes + 1, device); });
  allocated_[memory] = device;
  return memory;
}

void* Program::host_memory(size_t bytes) {
  return host_.emplace_back(std::make_unique<Bytes>(bytes + 1))->data();
}

/// Values of a weight: most in (-1, 1), now and then one that is not finite.
Program::Bytes Program::draw(const TensorView& view) {
  Bytes bytes(size_of(view));
  const auto width = static_cast<size_t>(byte_size(view.dtype, 1));
  const bool wild = one_in(16);
  for (size_t at = 0; at < bytes.size(); at += width) {
    double wide = static_cast<double>(random_() % 2000001) * 1e-6 - 1.0;
    if (wild && one_in(64)) wide = one_in(2) ? HUGE_VAL : std::nan("");
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

/// In every weight's place, of their own dtypes or of that one.
Program::Weights Program::memory_for(DType dtype) {
  Weights weights{specs_, specs_};
  for (size_t i = 0; i < specs_.size(); ++i) {
    TensorView &tested = weights.tested[i], &oracle = weights.oracle[i];
    if (dtype != DType::kBool) tested.dtype = oracle.dtype = dtype;
    const int device = first_device_ + static_cast<int>(i) % num_devices_;
    oracle.data = host_memory(size_of(oracle));
    if (places_[i] != Place::kOnHost) tested.device = {Device::Kind::kCuda, device, fake::stream(device, 1)};
    tested.data = on_device(tested) ? device_memory(size_of(tested), device) : host_memory(size_of(tested));
  }
  return weights;
}

void Program::make() {
  weights_ = memory_for(DType::kBool);
  others_ = memory_for(kDTypes[random_() % 4]);
  write(weights_);
  averages_.assign(options_.schedules.size(), weights_.tested);
  for (auto& views : averages_) {
    for (size_t i = 0; i < views.size(); ++i) {
      TensorView& view = views[i];
      view.dtype = options_.dtype;
      if (places_[i] != Place::kBeside) view.device = {};
      view.data = on_device(view) ? device_memory(size_of(view), view.device.index) : host_memory(size_of(view));
    }
  }
  arm();
  call([&] { tested_ = std::make_unique<Average>(weights_.tested, averages_, options_); });
  AverageOptions plain = options_;
  plain.overlap = false;
  oracle_ = std::make_unique<Average>(weights_.oracle, plain);
  before_ = averages_of_oracle();
}

}  // namespace shardow::testing
