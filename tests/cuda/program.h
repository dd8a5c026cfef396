// A random program: a model, options and calls drawn from a seed, done by an Average of weights on devices and by an
// oracle, a plain Average of the same weights on the host. What both hold must be equal, byte for byte, whenever the
// program looks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fake.h"
#include "shardow/average.h"
#include "tensor/dtype.h"

namespace shardow::testing {

/// What a program leaves out, to show that it would be missed.
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

inline void* stream_of(int device, int number) {
  return number == 0 ? nullptr : fake::stream(device, number);
}

class Program {
 public:
  explicit Program(uint64_t seed, Missing missing = Missing::kNothing);
  ~Program();

  // Empty, or what differed.
  std::string run();               ///< everything by the seed
  std::string run_with_threads();  ///< a thread for each stream, and nothing fails: for the thread sanitizer

 private:
  using Bytes = std::vector<std::byte>;

  void do_all();
  void choose();
  void choose_decays();
  void make();
  void go_on();
  void* device_memory(size_t bytes, int device);
  Bytes draw(const TensorView& view);

  // Calls of the Average and what surrounds them.
  void train();
  void write_weights();
  void update();
  void swap();
  void reset();
  void move();
  void change_stream();

  // Comparisons.
  void look();
  void look_at_weights();
  void look_at_counters();
  void look_at_files();
  void look_at_remains();
  bool averages_are(const std::vector<Bytes>& expected) const;
  void differs(const std::string& what);

  void call(const std::function<void()>& fn);
  void arm();
  void disarm();
  void recover();
  void undo_lost_update();
  Bytes fetch(const TensorView& view) const;
  std::vector<Bytes> averages_of_oracle() const;

  uint64_t seed_;
  Missing missing_;
  std::mt19937_64 random_;
  bool offloaded_ = false, faulty_ = false, may_fail_ = true;
  int num_devices_ = 1;
  AverageOptions options_;
  std::vector<std::pair<void*, int>> allocated_;
  std::vector<std::unique_ptr<Bytes>> host_;
  std::vector<TensorView> there_, here_;
  std::unique_ptr<Average> tested_, oracle_;
  std::vector<Bytes> before_;  // the oracle's averages before its last update
  std::string calls_, difference_;
};

}  // namespace shardow::testing
