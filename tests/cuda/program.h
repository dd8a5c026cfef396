// A random program: a model, options and calls drawn from a seed, done by an Average of weights on devices and by an
// oracle. What both hold must be equal whenever the program looks; graphs that it captured are replayed, of weights
// that have moved and of an Average that is gone too.
#pragma once

#include "average/driver.h"
#include "comparison.h"
#include "drawn_turns.h"

namespace shardow::testing {

using kernels::testing::Current;
using kernels::testing::Recording;

class Program : Comparison {
 public:
  explicit Program(uint64_t seed, Missing missing = Missing::kNothing) : Comparison(seed, missing) {}
  using Comparison::met;

  // Empty, or what differed.
  /// Everything by the seed
  std::string run() {
    const auto turns = random_();
    fake::reset({.num_devices = 3, .seed = random_(), .guard = true});
    fake::world().drops_waits = missing_ == Missing::kWaits;
    const fake::DrawnTurns drawn(turns);
    const Current current(kCallersDevice);
    do_all();
    if (fake::current_device() != kCallersDevice) differs("the caller's device");
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

  void do_all() {
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
  }

  void go_on() {
    arm();
    const uint64_t what = random_() % 28;
    calls_ += " " + std::to_string(what);
    switch (what) {
      case 0: return call([&] { tested_->wait(); });
      case 1:
      case 2: return look();
      case 3: return look_at(weights_);
      case 4: return look_at_counters();
      case 5:
      case 6: return swap();
      case 7: return reset();
      case 8:
      case 9: return move();
      case 10:
      case 11: return change_stream();
      case 12: return one_in(8) ? look_at_files() : update();
      case 13: return restart();
      case 14:
      case 15: return capture();
      case 16:
      case 17: return update();
      default: return train();
    }
  }

  /// The Average goes, in a capture now and then. Graphs that were captured of it do nothing any more.
  void end() {
    if (one_in(2)) train();
    disarm();
    if (faulty_) call([&] { tested_->wait(); });  // an update that failed is taken from the oracle
    const auto expected = averages_of_oracle();
    std::list<Recording> empty;
    if (can_capture() && one_in(2)) {
      call([&] { tested_->wait(); });
      if (!record([&] { tested_.reset(); }, &empty)) differs("a capture that was lost by the Average's end");
    }
    tested_.reset();
    launch(graphs_);
    launch(stale_);
    launch(empty);
    if (!averages_are(expected)) differs("averages after the end");
  }

  /// Graphs, the Average and memory, in this order.
  void release() {
    graphs_.clear();
    stale_.clear();
    tested_.reset();
    fake::synchronize();
    for (const auto& [memory, device] : allocated_) kernels::cuda::release(memory, device);
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
    before_ = averages_of_oracle();
    const std::string expected = error_of([&] { oracle_->update(std::max(step + 1, oracle_->stats().step + 1)); });
    if (raised != expected) differs("errors: " + raised + " and " + expected);
    if (!raised.empty()) note(Error(Code::kInternal, raised));
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
    before_ = averages_of_oracle();
  }

  void restart() {
    if (faulty_) return reset();
    const bool restarts = one_in(2);
    for (Average* average : {tested_.get(), oracle_.get()})
      restarts ? average::Driver::restart(*average) : average->set_state(average->state());
    before_ = averages_of_oracle();
  }

  /// The weights go to memory elsewhere, and something else is written where they were.
  void move() {
    const std::vector<TensorView> before = weights_.tested;
    for (TensorView& view : weights_.tested) {
      if (!on_device(view)) continue;
      const size_t bytes = size_of(view);
      void* const to = device_memory(bytes, view.device.index);
      fake::enqueue(view.device.index, view.device.stream, [=, from = view.data] { std::memcpy(to, from, bytes); });
      view.data = to;
    }
    call([&] { tested_->bind(weights_.tested); });
    stale_.splice(stale_.end(), graphs_);
    const bool frees = one_in(2);
    for (const TensorView& view : before) {
      if (!on_device(view)) continue;
      fake::enqueue(view.device.index, view.device.stream,
                    [=, bytes = size_of(view), from = view.data] { std::memset(from, 0x7f, bytes); });
    }
    if (frees) fake::synchronize();
    for (const TensorView& view : before) {
      if (frees && allocated_.erase(view.data) > 0) kernels::cuda::release(view.data, view.device.index);
    }
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
    before_ = averages_of_oracle();
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

  std::list<Recording> graphs_, stale_;  // stale_: of weights that have moved since
  std::map<void*, int> streams_to_end_;  // that the program made, and their devices
};

}  // namespace shardow::testing
