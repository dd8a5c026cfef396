#include "program.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "drawn_turns.h"
#include "fake.h"
#include "kernels/cuda.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"
#include "tensor/dtype.h"

namespace shardow::testing {
Program::Program(uint64_t seed, Missing missing) : seed_(seed), missing_(missing), random_(seed) {}

Program::~Program() = default;

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
void Program::call(const std::function<void()>& fn) {
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
    fake::enqueue(view.device.index, view.device.stream,
                  [=, bytes = size_of(view), from = view.data] { std::memset(from, 0x7f, bytes); });
  }
}

/// The caller goes on with another stream, which waits for what the last one has to do.
void Program::change_stream() {
  const int device = static_cast<int>(random_() % static_cast<uint64_t>(num_devices_));
  void* const next = stream_of(device, static_cast<int>(random_() % 3));
  const auto first =
      std::find_if(there_.begin(), there_.end(), [&](const TensorView& view) { return view.device.index == device; });
  if (first == there_.end() || fake::broken()) return;
  fake::follow(device, next, first->device.stream);
  for (TensorView& view : there_) {
    if (view.device.index == device) view.device.stream = next;
  }
  call([&] { tested_->set_stream(device, next); });
}

}  // namespace shardow::testing
