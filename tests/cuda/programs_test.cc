// Random programs over the fake device: every interleaving of copies, averages, swaps, saves, graphs and steps that a
// seed draws. SHARDOW_SEED=n runs the program of that seed alone; SHARDOW_ALL=1 runs ten thousand.
//
// A random program: a model, options and calls drawn from a seed, done by an Average of weights on devices and by an
// oracle, a plain Average of the same weights on the host. What both hold must be equal, byte for byte, whenever the
// program looks; graphs that it captured are replayed, of weights that have moved and of an Average that is gone too.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "average/impl.h"
#include "base/folder_fixture.h"
#include "fake.h"
#include "graph_calls.h"
#include "kernels/cuda.h"
#include "kernels/memory.h"
#include "kernels/row.h"
#include "shardow/average.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"
#include "simulation.h"
#include "tensor/dtype.h"

namespace shardow::testing {
namespace {

using kernels::testing::Current;
using kernels::testing::error_of;
using kernels::testing::Recording;

/// A step that a program leaves out, to show that it would be missed.
enum class Missing {
  kNothing,
  kFinishReading,  ///< the optimizer does not wait for the copies of its weights
  kWaits,          ///< no stream waits for another one
};

/// The device has failed for good, as the program wished.
struct Broken {};

size_t size_of(const TensorView& view) {
  return static_cast<size_t>(byte_size(view.dtype, view.region.size()));
}

bool on_device(const TensorView& view) {
  return view.device.kind == Device::Kind::kCuda;
}

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

class Program {
 public:
  explicit Program(uint64_t seed, Missing missing = Missing::kNothing) : missing_(missing), random_(seed) {}

  /// Texts of errors that programs are to meet, and how often all of them did.
  static inline std::map<std::string, int> met = {
      {"was not made, since weights did not reach the host; the averages are those of step", 0},
      {"blocks: the others did not reach the host. The next call takes it up", 0},
      {"and the weights may have changed since: load a checkpoint into new averages", 0},
      {"out of memory", 0},
      {"elements of the parameters are NaN or Inf, the first in", 0},
      {"capture update() anew", 0},
      {"update() while its stream is captured", 0},
  };

  /// Everything by the seed
  std::string run() {
    simulated::Simulation turns(random_());
    fake::reset({.num_devices = 3, .seed = random_(), .guard = true});
    fake::world().drops_waits = missing_ == Missing::kWaits;
    fake::between = [&] { turns.pass(); };
    turns.run(1, [this](int) {
      const Current current(kCallersDevice);
      do_all();
    });
    fake::between = nullptr;
    return difference_;
  }

  /// A thread for each stream, and nothing fails: for the thread sanitizer
  std::string run_with_threads() {
    fake::reset({.num_devices = 3, .threads = true});
    may_fail_ = false;
    do_all();
    fake::reset(fake::Options{});
    return difference_;
  }

 private:
  static constexpr int kCallersDevice = 2;  // which has none of the weights

  using Bytes = std::vector<std::byte>;
  enum class Place { kBeside, kOffloaded, kOnHost };  // of an average whose weight is on a device, or of both
  struct Weights {
    std::vector<TensorView> tested, oracle;
  };

  void do_all() {
    const int callers = fake::current_device();
    try {
      choose();
      make();
      if (faulty_ && one_in(4)) fake::world().streams.until_broken = static_cast<int>(random_() % 200);
      if (one_in(4)) capture();
      for (uint64_t left = 5 + random_() % 25; left > 0 && difference_.empty(); --left) go_on();
      if (difference_.empty()) look();
      if (difference_.empty()) look_at_counters();
      if (difference_.empty()) end();
    } catch (const Broken&) {
      look_at_remains();
    } catch (const Error& error) {
      if (fake::broken()) look_at_remains();
      if (!fake::broken()) differs(std::string("an error that nothing caused: ") + error.what());
    }
    release();
    if (difference_.empty()) look_at_driver();
    if (fake::current_device() != callers) differs("the caller's device");
  }

  /// Steps are as likely as they are often here; train() is.
  void go_on() {
    using P = Program;
    static constexpr void (P::*kSteps[])() = {
        &P::wait,    &P::look,    &P::look,   &P::look_at_weights, &P::look_at_counters, &P::swap,          &P::swap,
        &P::reset,   &P::move,    &P::move,   &P::change_stream,   &P::change_stream,    &P::look_at_files, &P::restart,
        &P::capture, &P::capture, &P::update, &P::update};
    arm();
    const uint64_t what = random_() % 28;
    calls_ += " " + std::to_string(what);
    what < std::size(kSteps) ? (this->*kSteps[what])() : train();
  }

  /// The Average goes, in a capture now and then. Graphs that were captured of it do nothing any more.
  void end() {
    if (one_in(2)) train();
    disarm();
    if (faulty_) wait();  // an update that failed is taken from the oracle
    const auto expected = fetch(averages_.oracle);
    std::list<Recording> empty;
    if (can_capture() && one_in(2)) {
      wait();
      if (!record([&] { tested_.reset(); }, &empty)) differs("a capture that was lost by the Average's end");
    }
    tested_.reset();
    launch(graphs_);
    launch(stale_);
    launch(empty);
    if (fetch(averages_.tested) != expected) differs("averages after the end");
  }

  /// Graphs, the Average and memory, in this order.
  void release() {
    graphs_.clear();
    stale_.clear();
    tested_.reset();
    oracle_.reset();
    fake::synchronize();
    memory_.clear();
  }

  // Calls of the Average and what surrounds them.
  /// An optimizer's step, on the weights' streams.
  void train() {
    if (missing_ != Missing::kFinishReading) call([&] { tested_->finish_reading(); });
    write(weights_);
    if (one_in(graphs_.empty() && stale_.empty() ? 8 : 2)) return replay();
    update();
    if (!faulty_ || missing_ != Missing::kNothing || !one_in(5)) return;
    call([&] { tested_->finish_reading(); });
    fake::world().streams.until_broken = static_cast<int>(random_() % 3);
  }

  /// Now and then with a look at what is copied: the weights' bytes, once, and nothing else.
  void update() {
    const bool offloads = !has(Place::kBeside);
    const bool counts = !faulty_ && offloads && one_in(4), raises = options_.non_finite == NonFinite::kRaise;
    const int64_t step = oracle_->stats().step, copied = counts ? tested_->stats().offload_bytes : 0;
    const int64_t to_host = fake::copied_to_host(), to_device = fake::world().copied_to_device;
    bool made = false;
    std::string raised;
    call([&] {
      if (made || (made = tested_->stats().step > step)) return;  // it was, and something else has failed
      if (!raises) return static_cast<void>(tested_->update());
      raised = error_of([&] {
        tested_->update();
        tested_->wait();
      });
    });
    if (counts) {
      tested_->wait();
      const int64_t bytes = tested_->stats().offload_bytes - copied;
      int64_t whole = 0;
      for (const TensorView& view : weights_.tested) whole += on_device(view) ? static_cast<int64_t>(size_of(view)) : 0;
      if (fake::copied_to_host() - to_host != bytes || fake::world().copied_to_device != to_device ||
          (bytes != 0 && bytes != whole))
        differs("bytes that were copied");
    }
    before_ = fetch(averages_.oracle);
    const std::string expected = error_of([&] { oracle_->update(std::max(step + 1, oracle_->stats().step + 1)); });
    if (raised != expected) differs("errors: " + raised + " and " + expected);
    if (!raised.empty()) note(Error(Code::kInternal, raised));
  }

  void wait() {
    call([&] { tested_->wait(); });
  }

  void swap() {
    const size_t k = random_() % oracle_->size();
    const Weights& into = one_in(3) ? others_ : weights_;
    if (&into == &others_) write(others_);
    call([&] { tested_->swap_in(into.tested, k); });
    oracle_->swap_in(into.oracle, k);
    look_at(into);
    arm();
    const auto out = [&] {
      if (tested_->swapped()) tested_->swap_out();
    };
    call(out, false);
    oracle_->swap_out();
    look_at(into);
  }

  /// A reset() that failed is mended by the next one alone.
  void reset() {
    call([&] { tested_->reset(); }, false);
    disarm();
    oracle_->reset();
    if (faulty_) oracle_->set_state(tested_->state());  // an update under way may have been given up
    before_ = fetch(averages_.oracle);
  }

  void restart() {
    if (faulty_) return reset();
    const bool restarts = one_in(2);
    for (Average* average : {tested_.get(), oracle_.get()})
      restarts ? average::Inside::of(*average).restart() : average->set_state(average->state());
    before_ = fetch(averages_.oracle);
  }

  /// The weights go to memory elsewhere, and something else is written where they were.
  void move() {
    std::vector<TensorView> before = weights_.tested;
    std::erase_if(before, [](const TensorView& view) { return !on_device(view); });
    for (TensorView& view : weights_.tested) {
      if (!on_device(view)) continue;
      void* const to = memory_for(view);
      in_order(view, [=, bytes = size_of(view), from = view.data] { std::memcpy(to, from, bytes); });
      view.data = to;
    }
    call([&] { tested_->bind(weights_.tested); });
    stale_.splice(stale_.end(), graphs_);
    const bool frees = one_in(2);
    for (const TensorView& view : before)
      in_order(view, [bytes = size_of(view), from = view.data] { std::memset(from, 0x7f, bytes); });
    if (!frees) return;
    fake::synchronize();
    for (const TensorView& view : before) memory_.erase(view.data);
  }

  /// The caller goes on with another stream, which waits for what the last one has to do, and may be gone by then.
  void change_stream() {
    const auto known = streams();
    if (known.empty() || fake::broken()) return;
    const auto [device, last] = *std::next(known.begin(), static_cast<int>(random_() % known.size()));
    void* next = one_in(4) ? nullptr : fake::stream(device, 1 + static_cast<int>(random_() % 2));
    if (one_in(3)) {
      const Current current(device);
      kernels::cuda::driver().create_stream(&next, kernels::cuda::kNonBlocking);
      streams_to_end_[next] = device;
    }
    fake::follow(device, next, last);
    for (std::vector<TensorView>* views : {&weights_.tested, &others_.tested}) {
      for (TensorView& view : *views) {
        if (on_device(view) && view.device.index == device) view.device.stream = next;
      }
    }
    const bool before = one_in(2), by_views = one_in(2);
    if (before) end_stream(device, last);
    call([&, device = device, next = next] {
      by_views ? tested_->bind(weights_.tested) : tested_->set_stream(device, next);
    });
    end_stream(device, last);
  }

  void end_stream(int device, void* stream) {
    if (streams_to_end_.erase(stream) == 0) return;
    const Current current(device);
    kernels::cuda::driver().destroy_stream(stream);
  }

  void capture() {
    if (!can_capture()) return update();
    disarm();
    graphs_.clear();
    leaves_memory_ = true;  // what graphs read
    bool applied = false;
    std::string refused;
    const bool kept = record(
        [&] {
          refused = error_of([&] { applied = tested_->update().applied; });
          static_cast<void>(error_of([&] { tested_->finish_reading(); }));
        },
        &graphs_);
    if (fake::broken()) throw Broken();
    if (refused.find("was not made") != refused.npos) recover();  // the update before this one
    if (!kept || applied) differs("a capture that was lost, or an update in it that was counted");
    if (refused.empty()) return;
    note(Error(Code::kUnsupported, refused));
    graphs_.clear();
    if (!has(Place::kOffloaded)) differs("a capture was refused: " + refused);
    replay();
  }

  /// One step by the graphs where they are of the weights as they are; else they do nothing. Without any device it is
  /// an update.
  void replay() {
    if (has(Place::kOffloaded)) {
      const std::string refused = error_of([&] { tested_->prepare_replay(); });
      if (refused.find("call update() after each replay") == refused.npos) differs("a replay was refused: " + refused);
      return update();
    }
    const bool captured = !graphs_.empty(), on_host = !has(Place::kBeside);
    if (on_host && options_.non_finite == NonFinite::kRaise) return update();
    const int64_t step = oracle_->stats().step;
    std::string refused;
    call([&] {
      if (tested_->stats().step > step) return;
      try {
        tested_->prepare_replay();
      } catch (const Error& error) {
        if (error.code() != Code::kInvalidArgument) throw;
        note(error);
        refused = error.what();
      }
    });
    const std::string expected = captured ? "the captured graph has no launch for that" : "capture update() anew";
    if (refused.empty() && !captured && !on_host) return differs("a replay of weights that were not captured");
    launch(refused.empty() ? graphs_ : stale_);
    if (!refused.empty()) {
      if (refused.find(expected) == refused.npos) differs("a replay was refused: " + refused);
      return capture();
    }
    before_ = fetch(averages_.oracle);
    oracle_->update(std::max(step + 1, oracle_->stats().step + 1));
  }

  bool can_capture() const {
    const auto all = streams();
    return !all.empty() && !fake::broken() && options_.non_finite != NonFinite::kRaise &&
           missing_ == Missing::kNothing &&
           std::none_of(all.begin(), all.end(), [](const auto& entry) { return entry.second == nullptr; });
  }

  /// Captures what fn() does, after all that was before, as torch does. False where a capture was lost.
  bool record(const std::function<void()>& fn, std::list<Recording>* graphs) {
    fake::synchronize();
    const int mode = static_cast<int>(random_() % 3);
    return graphs->emplace_back(streams(), mode, fn).status == 0;
  }

  void launch(const std::list<Recording>& graphs) {
    const auto all = streams();
    for (const Recording& recording : graphs) {
      const int status = recording.launch(all);
      if (fake::broken()) throw Broken();
      if (status != 0) differs("a replay: error " + std::to_string(status));
    }
  }

  // The model, and what is compared.
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
    weights_ = make_weights(DType::kBool);
    others_ = make_weights(kDTypes[random_() % 4]);
    write(weights_);
    std::vector<std::vector<TensorView>> averages(options_.schedules.size(), weights_.tested);
    for (auto& views : averages) {
      for (size_t i = 0; i < views.size(); ++i) {
        TensorView& view = views[i];
        view.dtype = options_.dtype;
        if (places_[i] != Place::kBeside) view.device = {};
        view.data = memory_for(view);
        averages_.tested.push_back(view);
      }
    }
    arm();
    call([&] { tested_ = std::make_unique<Average>(weights_.tested, averages, options_); });
    AverageOptions plain = options_;
    plain.overlap = false;
    oracle_ = std::make_unique<Average>(weights_.oracle, plain);
    for (size_t k = 0; k < oracle_->size(); ++k) {
      for (const TensorView& view : oracle_->views(k)) averages_.oracle.push_back(view);
    }
    before_ = fetch(averages_.oracle);
  }

  /// In every weight's place, of their own dtypes or of that one.
  Weights make_weights(DType dtype) {
    Weights weights{specs_, specs_};
    for (size_t i = 0; i < specs_.size(); ++i) {
      TensorView &tested = weights.tested[i], &oracle = weights.oracle[i];
      if (dtype != DType::kBool) tested.dtype = oracle.dtype = dtype;
      const int device = first_device_ + static_cast<int>(i) % num_devices_;
      oracle.data = memory_for(oracle);
      if (places_[i] != Place::kOnHost) tested.device = {Device::Kind::kCuda, device, fake::stream(device, 1)};
      tested.data = memory_for(tested);
    }
    return weights;
  }

  void* memory_for(const TensorView& view) {
    kernels::Memory memory;
    call([&] { memory = kernels::Memory(size_of(view) + 1, view.device); });
    void* const data = memory.data();
    memory_[data] = std::move(memory);
    return data;
  }

  /// Values of weights: most in (-1, 1), now and then one that is not finite.
  void write(const Weights& weights) {
    for (size_t i = 0; i < weights.oracle.size(); ++i) {
      const TensorView& view = weights.tested[i];
      Bytes values(size_of(view));
      const bool wild = one_in(16);
      kernels::with_dtype(view.dtype, [&]<class T>() {
        for (size_t at = 0; at < values.size(); at += sizeof(T)) {
          double wide = static_cast<double>(random_() % 2000001) * 1e-6 - 1.0;
          if (wild && one_in(64)) wide = one_in(2) ? HUGE_VAL : std::nan("");
          const T value = kernels::convert<T>(wide);
          std::memcpy(&values[at], &value, sizeof(T));
        }
      });
      if (values.empty()) continue;
      std::memcpy(weights.oracle[i].data, values.data(), values.size());
      in_order(view, [to = view.data, values] { std::memcpy(to, values.data(), values.size()); });
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
      if (tested_->stats().step > oracle_->stats().step || tested_->state() == oracle_->state()) return;
      for (size_t i = 0; i < before_.size(); ++i)
        std::copy(before_[i].begin(), before_[i].end(), static_cast<std::byte*>(averages_.oracle[i].data));
      oracle_->set_state(tested_->state());
    };
    call(mend, false);
  }

  void note(const Error& error) {
    const std::string text = error.what();
    calls_ += " (" + text + ")";
    for (auto& [part, times] : met) times += text.find(part) != text.npos ? 1 : 0;
  }

  void look_at(const Weights& weights) {
    for (size_t i = 0; i < weights.oracle.size(); ++i) {
      if (fetch(weights.tested[i]) != fetch(weights.oracle[i])) return differs("weights of " + weights.oracle[i].name);
    }
  }

  void look_at_weights() { look_at(weights_); }

  void look() {
    std::vector<Bytes> averages;
    call([&] {
      tested_->wait();
      averages = fetch(averages_.tested);
    });
    if (averages != fetch(averages_.oracle)) differs("averages");
  }

  std::string counters_of(const Average& average) const {
    const AverageStats stats = average.stats();
    const std::string state = average.state();
    std::string text = "step " + std::to_string(stats.step) + ", updates " + std::to_string(stats.updates);
    if (faulty_) return text;
    text += ", held " + std::to_string(stats.held_non_finite) + ", not finite ";
    if (const auto met_here = average.non_finite()) {
      text += has(Place::kBeside) ? "some" : std::to_string(met_here->elements);
      if (!has(Place::kBeside) && num_devices_ == 1) text += " from " + met_here->tensor;
    }
    return text + ", state " + state;
  }

  void look_at_counters() {
    std::string tested;
    call([&] {
      tested_->wait();
      tested = counters_of(*tested_);
    });
    const std::string expected = counters_of(*oracle_);
    if (tested != expected) differs("counters: " + tested + ", not " + expected);
  }

  void look_at_files() {
    if (!one_in(8)) return update();
    const auto folder = fs::temp_directory_path() / ("shardow_program_" + std::to_string(::getpid()));
    fs::create_directories(folder);
    leaves_memory_ = true;  // pinned chunks, for the next save
    const auto saved = [&](const char* name, std::span<const TensorView> views) {
      std::vector<TensorView> whole(views.begin(), views.end());  // a file has all of a tensor
      std::erase_if(whole, [](const TensorView& view) { return view.region != Region::whole(view.region.shape()); });
      shardow::save(*solo(), whole, folder / name);
      return bytes_of(folder / name);
    };
    std::string tested;
    call([&] { tested = saved("tested.safetensors", tested_->views(0)); });
    if (tested != saved("oracle.safetensors", oracle_->views(0))) differs("files");
    fs::remove_all(folder);
  }

  /// After a failure for good, averages on the host are those of a whole update, or every call says why they are not.
  void look_at_remains() {
    if (tested_ == nullptr || oracle_ == nullptr || places_.empty() || places_[0] != Place::kOffloaded) return;
    try {
      static_cast<void>(tested_->views());
      if (has(Place::kBeside)) return;
      const auto averages = fetch(averages_.tested);
      if (averages != fetch(averages_.oracle) && averages != before_) differs("averages after a failure");
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
    for (const char* const made : {"event that spins", "stream that the default one blocks"}) {
      if (!fake::calls_of(made).empty()) differs(made);
    }
    if (!fake::world().events.empty()) differs("events that were left");
    if (!leaves_memory_ && !fake::broken() && fake::allocated() > 0) differs("memory that was left");
  }

  void differs(const std::string& what) {
    if (difference_.empty()) difference_ = what + (faulty_ ? " (with failures)" : "") + " after" + calls_;
  }

  Bytes fetch(const TensorView& view) const {
    Bytes bytes(size_of(view));
    in_order(view, [&] { std::copy_n(static_cast<const std::byte*>(view.data), bytes.size(), bytes.data()); });
    if (!on_device(view)) return bytes;
    fake::run(streams().at(view.device.index), view.device.index);
    if (fake::broken()) throw Broken();
    return bytes;
  }

  std::vector<Bytes> fetch(const std::vector<TensorView>& views) const {
    std::vector<Bytes> all;
    for (const TensorView& view : views) all.push_back(fetch(view));
    return all;
  }

  /// Work of the caller: on the weights' stream where the view is on a device.
  void in_order(const TensorView& view, const std::function<void()>& work) const {
    on_device(view) ? fake::enqueue(view.device.index, streams().at(view.device.index), work) : work();
  }

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
  std::map<void*, kernels::Memory> memory_;
  Weights weights_, others_, averages_;  // others_: of another dtype, to swap into; averages_: all of them
  std::unique_ptr<Average> tested_, oracle_;
  std::vector<Bytes> before_;  // the oracle's averages before its last update
  std::string calls_, difference_;
  std::list<Recording> graphs_, stale_;  // stale_: of weights that have moved since
  std::map<void*, int> streams_to_end_;  // that the program made, and their devices
};

std::string under_way;

/// The guard's: the host has touched memory of the device. Says which program did.
void on_fault(int) {
  static_cast<void>(!::write(2, under_way.data(), under_way.size()));
  std::signal(SIGSEGV, SIG_DFL);
}

std::string alone(uint64_t seed) {
  return "SHARDOW_SEED=" + std::to_string(seed) + " cuda_programs_test --gtest_filter=Programs.Hold";
}

std::string run(uint64_t seed, Missing missing = Missing::kNothing) {
  under_way = "the host touched memory of a device; to see it alone: " + alone(seed) + "\n";
  std::signal(SIGSEGV, &on_fault);
  return Program(seed, missing).run();
}

TEST(Programs, Hold) {
  const char *const chosen = std::getenv("SHARDOW_SEED"), *const all = std::getenv("SHARDOW_ALL");
  const uint64_t first = chosen != nullptr ? std::strtoull(chosen, nullptr, 10) : 1;
  const uint64_t count = chosen != nullptr ? 1 : all != nullptr && *all == '1' ? 10000 : 300;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const std::string difference = run(seed);
    ASSERT_EQ(difference, "") << "to see it alone: " << alone(seed);
  }
  for (const auto& [text, times] : Program::met) EXPECT_TRUE(times > 0 || count == 1) << "no program met: " << text;
}

/// The names of all calls of the driver, by any thread.
std::vector<std::pair<std::string, int>> calls_of(uint64_t seed) {
  EXPECT_EQ(run(seed), "");
  std::vector<std::pair<std::string, int>> names;
  for (const fake::Call& call : fake::world().log) names.emplace_back(call.what, call.device);
  return names;
}

TEST(Programs, AreReplayedByTheirSeeds) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    calls_of(seed);  // those of the first time compile kernels
    ASSERT_EQ(calls_of(seed), calls_of(seed)) << alone(seed);
  }
}

TEST(Programs, HoldWithThreads) {
  for (uint64_t seed = 1; seed <= 40; ++seed) ASSERT_EQ(Program(seed).run_with_threads(), "") << seed;
}

int differing(Missing missing) {
  int number = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) number += run(seed, missing).empty() ? 0 : 1;
  return number;
}

TEST(Programs, TearWhereNothingWaits) {
  EXPECT_GE(differing(Missing::kFinishReading), 10);
  EXPECT_GE(differing(Missing::kWaits), 10);
}

}  // namespace
}  // namespace shardow::testing
