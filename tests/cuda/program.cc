#include "program.h"

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "drawn_turns.h"
#include "fake_runtime.h"
#include "kernels/cuda.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"
#include "tensor/dtype.h"

namespace shardow::testing {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

/// The device has failed for good, as the program wished.
struct Broken {};

bool is_narrow(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16;
}

size_t size_of(const TensorView& view) {
  return static_cast<size_t>(byte_size(view.dtype, view.region.size()));
}

void* stream_of(int device, int number) {
  return number == 0 ? nullptr : reinterpret_cast<void*>(static_cast<uintptr_t>(0x1000 + 16 * device + number));
}

template <size_t kSize>
int64_t one_of(const int64_t (&choices)[kSize], std::mt19937_64& random) {
  return choices[random() % kSize];
}

}  // namespace

Program::Program(uint64_t seed, Missing missing) : seed_(seed), missing_(missing), random_(seed) {}

Program::~Program() = default;

void Program::choose_decays() {
  options_.schedules.clear();
  for (uint64_t k = 1 + random_() % 3; k > 0; --k) {
    const Schedule choices[] = {Schedule::constant(0.9), Schedule::constant(0.99999), Schedule::constant(0.3), Schedule::tf_warmup(0.999)};
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
  if (is_narrow(options_.dtype) || (options_.dtype == DType::kF32 && options_.rule == Rule::kLerp && random_() % 3 == 0))
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
    auto half = static_cast<uint16_t>(view.dtype == DType::kBF16 ? bits >> 16 : 0x3000 + random_() % 0x800 + random_() % 2 * 0x8000);
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

std::string Program::run() {
  const auto turns = random_();
  fake::reset({.num_devices = 2, .seed = random_(), .guard = true});
  fake::drop_waits(missing_ == Missing::kWaits);
  const fake::DrawnTurns drawn(turns);
  do_all();
  return difference_;
}

std::string Program::run_with_threads() {
  fake::reset({.num_devices = 2, .threads = true});
  may_fail_ = false;
  do_all();
  fake::reset(2);
  return difference_;
}

void Program::do_all() {
  try {
    choose();
    make();
    if (faulty_ && random_() % 4 == 0) fake::break_after(static_cast<int>(random_() % 200));
    for (uint64_t left = 5 + random_() % 25; left > 0 && difference_.empty(); --left) go_on();
    if (difference_.empty()) look();
    if (difference_.empty()) look_at_counters();
  } catch (const Broken&) {
    look_at_remains();
  } catch (const Error& error) {
    if (fake::broken()) look_at_remains();
    if (!fake::broken()) differs(std::string("an error that nobody caused: ") + error.what());
  }
  tested_.reset();
  for (const auto& [memory, device] : allocated_) kernels::cuda::release(memory, device);
}

void Program::go_on() {
  arm();
  const uint64_t what = random_() % 24;
  calls_ += " " + std::to_string(what);
  switch (what) {
    case 0: return call([&] { tested_->wait(); });
    case 1:
    case 2: return look();
    case 3: return look_at_weights();
    case 4: return look_at_counters();
    case 5:
    case 6: return swap();
    case 7: return reset();
    case 8: return move();
    case 9: return change_stream();
    case 10: return random_() % 8 == 0 ? look_at_files() : update();
    case 11: return update();
    default: return train();
  }
}

/// Now and then something fails soon.
void Program::arm() {
  if (!faulty_ || random_() % 6 != 0) return;
  if (random_() % 3 == 0) {
    fake::fail_allocation(static_cast<int>(random_() % 6));
  } else {
    fake::fail_copy(static_cast<int>(random_() % 8), 1 + static_cast<int>(random_() % 2));
  }
}

void Program::disarm() {
  fake::fail_copy(-1);
  fake::fail_allocation(-1);
}

/// Until fn() goes through.
template <class Fn>
void Program::call(const Fn& fn) {
  for (int tries = 0;; ++tries) {
    try {
      return fn();
    } catch (const Error& error) {
      if (fake::broken()) throw Broken();
      if (!faulty_ || tries == 4) throw;
      calls_ += std::string(" (") + error.what() + ")";
      recover();
    }
  }
}

/// What failed fails no more; what was under way is ended. An update that was not made is taken from the oracle.
void Program::recover() {
  disarm();
  if (tested_ == nullptr || oracle_ == nullptr) return;
  for (int tries = 0;; ++tries) {
    try {
      tested_->wait();
      if (tested_->swapped()) tested_->swap_out();
      return undo_lost_update();
    } catch (const Error& error) {
      if (fake::broken()) throw Broken();
      if (tries == 3) throw;
    }
  }
}

void Program::undo_lost_update() {
  if (tested_->stats().step > oracle_->stats().step || tested_->state() == oracle_->state()) return;
  size_t at = 0;
  for (size_t k = 0; k < oracle_->size(); ++k) {
    for (const TensorView& view : oracle_->views(k)) {
      std::copy(before_[at].begin(), before_[at].end(), static_cast<std::byte*>(view.data));
      ++at;
    }
  }
  oracle_->set_state(tested_->state());
}

/// An optimizer's step, on the weights' streams.
void Program::train() {
  if (missing_ != Missing::kFinishReading) call([&] { tested_->finish_reading(); });
  write_weights();
  update();
}

void Program::write_weights() {
  for (size_t i = 0; i < here_.size(); ++i) {
    const Bytes values = draw(here_[i]);
    if (values.empty()) continue;
    std::memcpy(here_[i].data, values.data(), values.size());
    fake::enqueue(there_[i].device.index, there_[i].device.stream,
                  [to = there_[i].data, values] { std::memcpy(to, values.data(), values.size()); });
  }
}

void Program::update() {
  const int64_t step = oracle_->stats().step;
  bool made = false;
  call([&] {
    if (made || (made = tested_->stats().step > step)) return;  // it was, and something else has failed
    tested_->update();
  });
  before_ = averages_of_oracle();
  oracle_->update(std::max(step + 1, oracle_->stats().step + 1));
}

void Program::swap() {
  const size_t k = random_() % oracle_->size();
  call([&] { tested_->swap_in(k); });
  oracle_->swap_in(k);
  look_at_weights();
  arm();
  for (int tries = 0; tested_->swapped(); ++tries) {
    try {
      tested_->swap_out();
    } catch (const Error&) {
      if (fake::broken()) throw Broken();
      if (!faulty_ || tries == 4) throw;
    }
  }
  oracle_->swap_out();
  look_at_weights();
}

/// What a reset() that failed has left is mended by the next one alone.
void Program::reset() {
  for (int tries = 0;; ++tries) {
    try {
      tested_->reset();
      break;
    } catch (const Error&) {
      if (fake::broken()) throw Broken();
      if (!faulty_ || tries == 4) throw;
    }
  }
  disarm();
  oracle_->reset();
  oracle_->set_state(tested_->state());  // an update under way may have been given up
  before_ = averages_of_oracle();
}

/// The weights go to memory elsewhere, and something else is written where they were.
void Program::move() {
  std::vector<TensorView> before = there_;
  for (TensorView& view : there_) {
    const size_t bytes = size_of(view);
    void* const to = device_memory(bytes, view.device.index);
    fake::enqueue(view.device.index, view.device.stream, [=, from = view.data] { std::memcpy(to, from, bytes); });
    view.data = to;
  }
  call([&] { tested_->bind(there_); });
  for (const TensorView& view : before) {
    fake::enqueue(view.device.index, view.device.stream, [=, bytes = size_of(view), from = view.data] { std::memset(from, 0x7f, bytes); });
  }
}

/// The caller goes on with another stream, which waits for what the last one has to do.
void Program::change_stream() {
  const int device = static_cast<int>(random_() % static_cast<uint64_t>(num_devices_));
  void* const next = stream_of(device, static_cast<int>(random_() % 3));
  const auto first = std::find_if(there_.begin(), there_.end(), [&](const TensorView& view) { return view.device.index == device; });
  if (first == there_.end() || fake::broken()) return;
  fake::follow(device, next, first->device.stream);
  for (TensorView& view : there_) {
    if (view.device.index == device) view.device.stream = next;
  }
  call([&] { tested_->set_stream(device, next); });
}

Program::Bytes Program::fetch(const TensorView& view) const {
  Bytes bytes(size_of(view));
  if (view.device.kind == Device::Kind::kCpu) {
    std::copy_n(static_cast<const std::byte*>(view.data), bytes.size(), bytes.data());
  } else {
    const auto weight = std::find_if(there_.begin(), there_.end(), [&](const TensorView& one) { return one.name == view.name; });
    fake::fetch(bytes.data(), view.data, bytes.size(), view.device.index, weight->device.stream);
    if (fake::broken()) throw Broken();
  }
  return bytes;
}

std::vector<Program::Bytes> Program::averages_of_oracle() const {
  std::vector<Bytes> bytes;
  for (size_t k = 0; k < oracle_->size(); ++k) {
    for (const TensorView& view : oracle_->views(k)) bytes.push_back(fetch(view));
  }
  return bytes;
}

bool Program::averages_are(const std::vector<Bytes>& expected) const {
  size_t at = 0;
  for (size_t k = 0; k < tested_->size(); ++k) {
    for (const TensorView& view : tested_->views(k)) {
      if (fetch(view) != expected[at++]) return false;
    }
  }
  return true;
}

void Program::look() {
  bool equal = false;
  call([&] {
    tested_->wait();
    equal = averages_are(averages_of_oracle());
  });
  if (!equal) differs("averages");
}

void Program::look_at_weights() {
  for (size_t i = 0; i < here_.size(); ++i) {
    if (fetch(there_[i]) != fetch(here_[i])) return differs("weights of " + here_[i].name);
  }
}

void Program::look_at_counters() {
  std::string state;
  AverageStats stats;
  call([&] {
    tested_->wait();
    stats = tested_->stats();
    state = tested_->state();
  });
  const AverageStats expected = oracle_->stats();
  if (stats.step != expected.step || stats.updates != expected.updates) differs("counters");
  if (!faulty_ && stats.held_non_finite != expected.held_non_finite)
    differs("what was held: " + std::to_string(stats.held_non_finite) + ", not " + std::to_string(expected.held_non_finite));
  if (!faulty_ && state != oracle_->state()) differs("states: " + state + " and " + oracle_->state());
}

void Program::look_at_files() {
  const auto folder = std::filesystem::temp_directory_path() / ("shardow_program_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const auto saved = [&](const char* name, std::span<const TensorView> views) {
    shardow::save(*solo(), views, folder / name);
    std::ifstream file(folder / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto whole = [](std::span<const TensorView> views) {  // a file has all of a tensor
    std::vector<TensorView> found(views.begin(), views.end());
    std::erase_if(found, [](const TensorView& view) { return view.region != Region::whole(view.region.shape()); });
    return found;
  };
  std::string found;
  call([&] { found = saved("tested.safetensors", whole(tested_->views(0))); });
  if (found != saved("oracle.safetensors", whole(oracle_->views(0)))) differs("files");
  std::filesystem::remove_all(folder);
}

/// After a failure for good, averages on the host are those of a whole update, or nobody is given them.
void Program::look_at_remains() {
  if (!offloaded_ || tested_ == nullptr || oracle_ == nullptr) return;
  try {
    if (!averages_are(averages_of_oracle()) && !averages_are(before_)) differs("averages after a failure");
  } catch (const Error&) {
  }
}

void Program::differs(const std::string& what) {
  if (difference_.empty())
    difference_ = what + (offloaded_ ? " (offloaded" : " (resident") + (faulty_ ? ", with failures)" : ")") + " after" + calls_;
}

}  // namespace shardow::testing
