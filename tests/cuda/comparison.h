// An Average of weights on devices beside an oracle, a plain Average of the same weights on the host: what they are
// drawn from, and what is compared, byte for byte.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "graph_calls.h"
#include "kernels/cuda.h"
#include "kernels/row.h"
#include "shardow/average.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"
#include "tensor/dtype.h"
#include "world.h"

namespace shardow::testing {

/// A step that a program leaves out, to show that it would be missed.
enum class Missing {
  kNothing,
  kFinishReading,  ///< the optimizer does not wait for the copies of its weights
  kWaits,          ///< no stream waits for another one
};

/// The device has failed for good, as the program wished.
struct Broken {};

inline size_t size_of(const TensorView& view) {
  return static_cast<size_t>(byte_size(view.dtype, view.region.size()));
}

inline bool on_device(const TensorView& view) {
  return view.device.kind == Device::Kind::kCuda;
}

/// "" where it goes through.
template <typename Fn>
std::string error_of(const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

inline constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

class Comparison {
 public:
  /// Texts of errors that programs are to meet, and how often all of them did.
  static std::map<std::string, int>& met() {
    static std::map<std::string, int> met = {
        {"was not made, since weights did not reach the host; the averages are those of step", 0},
        {"blocks: the others did not reach the host. The next call takes it up", 0},
        {"and the weights may have changed since: load a checkpoint into new averages", 0},
        {"out of memory", 0},
        {"elements of the parameters are NaN or Inf, the first in", 0},
        {"capture update() anew", 0},
        {"update() while its stream is captured", 0},
    };
    return met;
  }

 protected:
  using Bytes = std::vector<std::byte>;
  enum class Place { kBeside, kOffloaded, kOnHost };  // of an average whose weight is on a device, or of both
  struct Weights {
    std::vector<TensorView> tested, oracle;
  };

  Comparison(uint64_t seed, Missing missing) : missing_(missing), random_(seed) {}

  void choose() {
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
    const bool narrow = byte_size(options_.dtype, 1) == 2;
    options_.rule = narrow || one_in(2) ? Rule::kLerp : static_cast<Rule>(random_() % 6);
    if (narrow || (options_.dtype == DType::kF32 && options_.rule == Rule::kLerp && one_in(3)))
      options_.rounding = Rounding::kStochastic;
    options_.non_finite = one_in(4) ? NonFinite::kPropagate : NonFinite::kHold;
    options_.update_every = one_in(4) ? 2 : 1;
    options_.start_step = one_in(4) ? 2 : 0;
    options_.seed = random_();
    options_.num_threads = one_in(8) ? 2 : 1;
    options_.ring_bytes = one_of({4096, 8192, 20000, 1 << 20});
    choose_weights();
    const bool together = std::count(places_.begin(), places_.end(), places_[0]) == std::ssize(places_);
    if (!faulty_ && together && one_in(8)) options_.non_finite = NonFinite::kRaise;
    const bool beside = has(Place::kBeside);
    options_.overlap = !beside && missing_ == Missing::kNothing && one_in(6);
  }

  void choose_weights() {
    const uint64_t kind = missing_ != Missing::kNothing ? 2 : random_() % 6;  // beside, offloaded, or mixed
    const bool mixed = one_in(3);
    const DType dtype = kDTypes[random_() % 4];
    for (uint64_t i = 0, count = 1 + random_() % 5; i < count; ++i) {
      const int64_t rows = one_of({0, 1, 3, 7, 50, 200}), columns = one_of({1, 5, 11, 16});
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

  void make() {
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

  /// In every weight's place, of their own dtypes or of that one.
  Weights memory_for(DType dtype) {
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

  void* device_memory(size_t bytes, int device) {
    void* memory = nullptr;
    call([&] { memory = kernels::cuda::allocate(bytes + 1, device); });
    allocated_[memory] = device;
    return memory;
  }

  void* host_memory(size_t bytes) { return host_.emplace_back(std::make_unique<Bytes>(bytes + 1))->data(); }

  /// Values of a weight: most in (-1, 1), now and then one that is not finite.
  Bytes draw(const TensorView& view) {
    Bytes bytes(size_of(view));
    const auto width = static_cast<size_t>(byte_size(view.dtype, 1));
    const bool wild = one_in(16);
    for (size_t at = 0; at < bytes.size(); at += width) {
      double wide = static_cast<double>(random_() % 2000001) * 1e-6 - 1.0;
      if (wild && one_in(64)) wide = one_in(2) ? HUGE_VAL : std::nan("");
      kernels::with_dtype(view.dtype, [&]<class T>() {
        const T value = kernels::convert<T>(wide);
        std::memcpy(&bytes[at], &value, sizeof(T));
      });
    }
    return bytes;
  }

  void write(const Weights& weights) {
    for (size_t i = 0; i < weights.oracle.size(); ++i) {
      const Bytes values = draw(weights.oracle[i]);
      if (values.empty()) continue;
      const TensorView& view = weights.tested[i];
      const auto copy = [to = view.data, values] { std::memcpy(to, values.data(), values.size()); };
      std::memcpy(weights.oracle[i].data, values.data(), values.size());
      on_device(view) ? fake::enqueue(view.device.index, view.device.stream, copy) : copy();
    }
  }

  /// Until fn() goes through. What it leaves undone is mended, unless the next call of it does that.
  void call(const std::function<void()>& fn, bool mends = true) {
    for (int tries = 0;; ++tries) {
      try {
        return fn();
      } catch (const Error& error) {
        note(error);
        if (fake::broken()) throw Broken();
        if (!faulty_ || tries == 4) throw;
        if (mends) recover();
      }
    }
  }

  /// Now and then something fails soon.
  void arm() {
    if (!faulty_ || !one_in(6)) return;
    if (one_in(3)) {
      fake::fail_allocation(static_cast<int>(random_() % 6));
    } else {
      fake::fail_copy(static_cast<int>(random_() % 8), 1 + static_cast<int>(random_() % 4));
    }
  }

  void disarm() {
    fake::fail_copy(-1);
    fake::fail_allocation(-1);
  }

  /// Ends what failed and what was under way. An update that was not made is taken from the oracle.
  void recover() {
    disarm();
    if (tested_ == nullptr || oracle_ == nullptr) return;
    const auto mend = [&] {
      tested_->wait();
      if (tested_->swapped()) tested_->swap_out();
      undo_lost_update();
    };
    call(mend, false);
  }

  void undo_lost_update() {
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

  void note(const Error& error) {
    const std::string text = error.what();
    calls_ += " (" + text + ")";
    for (auto& [part, times] : met()) times += text.find(part) != text.npos ? 1 : 0;
  }

  void look_at(const Weights& weights) {
    for (size_t i = 0; i < weights.oracle.size(); ++i) {
      if (fetch(weights.tested[i]) != fetch(weights.oracle[i])) return differs("weights of " + weights.oracle[i].name);
    }
  }

  // Comparisons.
  void look() {
    bool equal = false;
    call([&] {
      tested_->wait();
      equal = averages_are(averages_of_oracle());
    });
    if (!equal) differs("averages");
  }

  void look_at_counters() {
    std::string state;
    AverageStats stats;
    std::optional<NonFiniteReport> report;
    call([&] {
      tested_->wait();
      stats = tested_->stats();
      state = tested_->state();
      if (!faulty_) report = tested_->non_finite();
    });
    const AverageStats expected = oracle_->stats();
    if (stats.step != expected.step || stats.updates != expected.updates) differs("counters");
    if (faulty_) return;
    if (stats.held_non_finite != expected.held_non_finite)
      differs("what was held: " + std::to_string(stats.held_non_finite) + ", not " +
              std::to_string(expected.held_non_finite));
    const auto text = [&](const std::optional<NonFiniteReport>& met) {
      return !met                  ? "none"
             : has(Place::kBeside) ? "some"
                                   : std::to_string(met->elements) + (num_devices_ == 1 ? " from " + met->tensor : "");
    };
    const std::string met = text(report), wanted = text(oracle_->non_finite());
    if (met != wanted) differs("not finite: " + met + ", not " + wanted);
    if (state != oracle_->state()) differs("states: " + state + " and " + oracle_->state());
  }

  void look_at_files() {
    const auto folder = std::filesystem::temp_directory_path() / ("shardow_program_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
    leaves_memory_ = true;  // pinned chunks, for the next save
    const auto saved = [&](const char* name, std::span<const TensorView> views) {
      std::vector<TensorView> whole(views.begin(), views.end());  // a file has all of a tensor
      std::erase_if(whole, [](const TensorView& view) { return view.region != Region::whole(view.region.shape()); });
      shardow::save(*solo(), whole, folder / name);
      std::ifstream file(folder / name, std::ios::binary);
      return std::string(std::istreambuf_iterator<char>(file), {});
    };
    std::string tested;
    call([&] { tested = saved("tested.safetensors", tested_->views(0)); });
    if (tested != saved("oracle.safetensors", oracle_->views(0))) differs("files");
    std::filesystem::remove_all(folder);
  }

  /// After a failure for good, averages on the host are those of a whole update, or every call says why they are not.
  void look_at_remains() {
    if (tested_ == nullptr || oracle_ == nullptr || places_.empty() || places_[0] != Place::kOffloaded) return;
    try {
      static_cast<void>(tested_->views());
      if (has(Place::kBeside)) return;
      if (!averages_are(averages_of_oracle()) && !averages_are(before_)) differs("averages after a failure");
    } catch (const Error& error) {
      note(error);
      if (std::string(error.what()).find("stopped after") == std::string::npos) return;
      for (const auto& refused : {error_of([&] { tested_->update(); }), error_of([&] { tested_->swap_in(); }),
                                  error_of([&] { tested_->finish_reading(); })})
        if (refused.empty()) differs("averages of no step are used");
    }
  }

  /// When all is released: the devices that were used, threads that wait asleep, and nothing left.
  void look_at_driver() {
    int mode = kernels::testing::kGlobal;
    kernels::cuda::driver().exchange_capture_mode(&mode);
    if (mode != kernels::testing::kGlobal) differs("the caller's capture mode");
    const auto all = streams();
    for (const int device : fake::world().contexts) {
      if (all.count(device) == 0 && device != fake::current_device()) differs("a context of a device that is not used");
    }
    if (!fake::calls_of("event that spins").empty()) differs("a thread that spins");
    if (!fake::world().events.empty()) differs("events that were left");
    if (!leaves_memory_ && !fake::broken() && fake::allocated() > 0) differs("memory that was left");
  }

  bool averages_are(const std::vector<Bytes>& expected) const {
    size_t at = 0;
    for (const auto& views : averages_) {
      for (const TensorView& view : views) {
        if (fetch(view) != expected[at++]) return false;
      }
    }
    return true;
  }

  void differs(const std::string& what) {
    if (difference_.empty()) difference_ = what + (faulty_ ? " (with failures)" : "") + " after" + calls_;
  }

  Bytes fetch(const TensorView& view) const {
    Bytes bytes(size_of(view));
    if (on_device(view)) {
      fake::fetch(bytes.data(), view.data, bytes.size(), view.device.index, streams().at(view.device.index));
      if (fake::broken()) throw Broken();
    } else {
      std::copy_n(static_cast<const std::byte*>(view.data), bytes.size(), bytes.data());
    }
    return bytes;
  }

  std::vector<Bytes> averages_of_oracle() const {
    std::vector<Bytes> bytes;
    for (size_t k = 0; k < oracle_->size(); ++k) {
      for (const TensorView& view : oracle_->views(k)) bytes.push_back(fetch(view));
    }
    return bytes;
  }

  // Graphs.
  /// The streams of the weights, by device.
  std::map<int, void*> streams() const {
    std::map<int, void*> streams;
    for (const TensorView& view : weights_.tested) {
      if (on_device(view)) streams[view.device.index] = view.device.stream;
    }
    return streams;
  }

  bool one_in(uint64_t many) { return random_() % many == 0; }

  bool has(Place place) const { return std::find(places_.begin(), places_.end(), place) != places_.end(); }

  template <size_t kSize>
  int64_t one_of(const int64_t (&choices)[kSize]) {
    return choices[random_() % kSize];
  }

  Missing missing_;
  std::mt19937_64 random_;
  bool faulty_ = false, may_fail_ = true, leaves_memory_ = false;
  int first_device_ = 0, num_devices_ = 1;
  AverageOptions options_;
  std::vector<TensorView> specs_;
  std::vector<Place> places_;
  std::map<void*, int> allocated_;  // on devices
  std::vector<std::unique_ptr<Bytes>> host_;
  Weights weights_, others_;  // others_: of another dtype, to swap into
  std::vector<std::vector<TensorView>> averages_;
  std::unique_ptr<Average> tested_, oracle_;
  std::vector<Bytes> before_;  // the oracle's averages before its last update
  std::string calls_, difference_;
};

}  // namespace shardow::testing
