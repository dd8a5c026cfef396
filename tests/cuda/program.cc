#include "program.h"

#include <algorithm>
#include <cstring>

#include "average/driver.h"
#include "drawn_turns.h"
#include "graph_calls.h"
#include "kernels/cuda.h"
#include "world.h"

namespace shardow::testing {

using kernels::testing::Current;

namespace {

constexpr int kCallersDevice = 2;  // which has none of the weights

}  // namespace

Program::Program(uint64_t seed, Missing missing) : seed_(seed), missing_(missing), random_(seed) {}

Program::~Program() = default;

std::string Program::run() {
  const auto turns = random_();
  fake::reset({.num_devices = 3, .seed = random_(), .guard = true});
  fake::world().drops_waits = missing_ == Missing::kWaits;
  const fake::DrawnTurns drawn(turns);
  const Current current(kCallersDevice);
  do_all();
  if (fake::current_device() != kCallersDevice) differs("the caller's device");
  return difference_;
}

std::string Program::run_with_threads() {
  fake::reset({.num_devices = 3, .threads = true});
  may_fail_ = false;
  do_all();
  fake::reset(fake::Options{});
  return difference_;
}

void Program::do_all() {
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

void Program::go_on() {
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

/// Now and then something fails soon.
void Program::arm() {
  if (!faulty_ || !one_in(6)) return;
  if (one_in(3)) {
    fake::fail_allocation(static_cast<int>(random_() % 6));
  } else {
    fake::fail_copy(static_cast<int>(random_() % 8), 1 + static_cast<int>(random_() % 4));
  }
}

void Program::disarm() {
  fake::fail_copy(-1);
  fake::fail_allocation(-1);
}

std::map<std::string, int>& Program::met() {
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

void Program::note(const Error& error) {
  const std::string text = error.what();
  calls_ += " (" + text + ")";
  for (auto& [part, times] : met()) times += text.find(part) != text.npos ? 1 : 0;
}

/// Until fn() goes through. What it leaves undone is mended, unless the next call of it does that.
void Program::call(const std::function<void()>& fn, bool mends) {
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

/// What failed fails no more; what was under way is ended. An update that was not made is taken from the oracle.
void Program::recover() {
  disarm();
  if (tested_ == nullptr || oracle_ == nullptr) return;
  const auto mend = [&] {
    tested_->wait();
    if (tested_->swapped()) tested_->swap_out();
    undo_lost_update();
  };
  call(mend, false);
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
  write(weights_);
  if (!(graphs_.empty() && stale_.empty()) && one_in(2)) return replay();
  update();
  if (!faulty_ || missing_ != Missing::kNothing || !one_in(16)) return;
  call([&] { tested_->finish_reading(); });
  fake::world().streams.until_broken = static_cast<int>(random_() % 3);
}

void Program::write(const Weights& weights) {
  for (size_t i = 0; i < weights.oracle.size(); ++i) {
    const Bytes values = draw(weights.oracle[i]);
    if (values.empty()) continue;
    const TensorView& view = weights.tested[i];
    const auto copy = [to = view.data, values] { std::memcpy(to, values.data(), values.size()); };
    std::memcpy(weights.oracle[i].data, values.data(), values.size());
    on_device(view) ? fake::enqueue(view.device.index, view.device.stream, copy) : copy();
  }
}

/// Now and then with a look at what is copied: the weights' bytes, once, and nothing else.
void Program::update() {
  const bool offloads = !has(Place::kBeside);
  const bool counts = !faulty_ && offloads && one_in(4), raises = options_.non_finite == NonFinite::kRaise;
  const int64_t step = oracle_->stats().step, copied = counts ? tested_->stats().offload_bytes : 0;
  const int64_t to_host = fake::copied_to_host(), to_device = fake::copied_to_device();
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
    if (fake::copied_to_host() - to_host != bytes || fake::copied_to_device() != to_device ||
        (bytes != 0 && bytes != whole))
      differs("bytes that were copied");
  }
  before_ = averages_of_oracle();
  const std::string expected = error_of([&] { oracle_->update(std::max(step + 1, oracle_->stats().step + 1)); });
  if (raised != expected) differs("errors: " + raised + " and " + expected);
  if (!raised.empty()) note(Error(Code::kInternal, raised));
}

void Program::swap() {
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

/// What a reset() that failed has left is mended by the next one alone.
void Program::reset() {
  call([&] { tested_->reset(); }, false);
  disarm();
  oracle_->reset();
  if (faulty_) oracle_->set_state(tested_->state());  // an update under way may have been given up
  before_ = averages_of_oracle();
}

void Program::restart() {
  if (faulty_) return reset();
  const bool restarts = one_in(2);
  for (Average* average : {tested_.get(), oracle_.get()})
    restarts ? average::Driver::restart(*average) : average->set_state(average->state());
  before_ = averages_of_oracle();
}

/// The weights go to memory elsewhere, and something else is written where they were.
void Program::move() {
  const std::vector<TensorView> before = weights_.tested;
  for (TensorView& view : weights_.tested) {
    if (!on_device(view)) continue;
    const size_t bytes = size_of(view);
    void* const to = device_memory(bytes, view.device.index);
    fake::enqueue(view.device.index, view.device.stream, [=, from = view.data] { std::memcpy(to, from, bytes); });
    view.data = to;
  }
  call([&] { tested_->bind(weights_.tested); });
  stale_.insert(stale_.end(), graphs_.begin(), graphs_.end());
  graphs_.clear();
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
void Program::change_stream() {
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

void Program::end_stream(int device, void* stream) {
  if (streams_to_end_.erase(stream) == 0) return;
  const Current current(device);
  kernels::cuda::driver().destroy_stream(stream);
}

/// Graphs, the Average and memory, in this order.
void Program::release() {
  destroy(graphs_);
  destroy(stale_);
  tested_.reset();
  fake::synchronize();
  for (const auto& [memory, device] : allocated_) kernels::cuda::release(memory, device);
}

}  // namespace shardow::testing
