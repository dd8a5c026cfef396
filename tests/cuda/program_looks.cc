// What a random program looks at: averages, weights, counters, files and the driver against the oracle's.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "graph_calls.h"
#include "program.h"
#include "shardow/checkpoint.h"
#include "world.h"

namespace shardow::testing {

Program::Bytes Program::fetch(const TensorView& view) const {
  Bytes bytes(size_of(view));
  if (on_device(view)) {
    fake::fetch(bytes.data(), view.data, bytes.size(), view.device.index, streams().at(view.device.index));
    if (fake::broken()) throw Broken();
  } else {
    std::copy_n(static_cast<const std::byte*>(view.data), bytes.size(), bytes.data());
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
  for (const auto& views : averages_) {
    for (const TensorView& view : views) {
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

void Program::look_at(const Weights& weights) {
  for (size_t i = 0; i < weights.oracle.size(); ++i) {
    if (fetch(weights.tested[i]) != fetch(weights.oracle[i])) return differs("weights of " + weights.oracle[i].name);
  }
}

void Program::look_at_counters() {
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

void Program::look_at_files() {
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
void Program::look_at_remains() {
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
void Program::look_at_driver() {
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

void Program::differs(const std::string& what) {
  if (difference_.empty()) difference_ = what + (faulty_ ? " (with failures)" : "") + " after" + calls_;
}

}  // namespace shardow::testing
