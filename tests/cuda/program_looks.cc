// What a random program looks at: averages, weights, counters and files against the oracle's.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "fake.h"
#include "program.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"

namespace shardow::testing {

Program::Bytes Program::fetch(const TensorView& view) const {
  Bytes bytes(size_of(view));
  if (view.device.kind == Device::Kind::kCpu) {
    std::copy_n(static_cast<const std::byte*>(view.data), bytes.size(), bytes.data());
  } else {
    const auto weight =
        std::find_if(there_.begin(), there_.end(), [&](const TensorView& one) { return one.name == view.name; });
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
    differs("what was held: " + std::to_string(stats.held_non_finite) + ", not " +
            std::to_string(expected.held_non_finite));
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
    difference_ =
        what + (offloaded_ ? " (offloaded" : " (resident") + (faulty_ ? ", with failures)" : ")") + " after" + calls_;
}

}  // namespace shardow::testing
