// A random program: a model, options and calls drawn from a seed, done by an Average of weights on devices and by an
// oracle, a plain Average of the same weights on the host. What both hold must be equal, byte for byte, whenever the
// program looks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fake.h"
#include "shardow/average.h"
#include "shardow/error.h"
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

class Program {
 public:
  explicit Program(uint64_t seed, Missing missing = Missing::kNothing);
  ~Program();

  // Empty, or what differed.
  std::string run();               ///< everything by the seed
  std::string run_with_threads();  ///< a thread for each stream, and nothing fails: for the thread sanitizer

  /// Texts of errors that programs are to meet, and how often all of them did.
  static std::map<std::string, int>& met();

 private:
  using Bytes = std::vector<std::byte>;
  enum class Place { kBeside, kOffloaded, kOnHost };  // of an average whose weight is on a device, or of both
  struct Weights {
    std::vector<TensorView> tested, oracle;
  };
  struct Replay {
    int device;
    void* graph;
  };

  void do_all();
  void choose();
  void choose_weights();
  void make();
  Weights memory_for(DType dtype);
  void* device_memory(size_t bytes, int device);
  void* host_memory(size_t bytes);
  Bytes draw(const TensorView& view);
  void go_on();
  void end();
  void release();

  // Calls of the Average and what surrounds them.
  void train();
  void write(const Weights& weights);
  void update();
  void swap();
  void reset();
  void restart();
  void move();
  void change_stream();
  void capture();
  void replay();

  // Graphs.
  std::map<int, void*> streams() const;
  bool can_capture() const;
  bool record(const std::function<void()>& fn, std::vector<Replay>* graphs);
  void launch(const std::vector<Replay>& graphs);
  void destroy(std::vector<Replay>& graphs);
  void end_stream(int device, void* stream);

  // Comparisons.
  void look();
  void look_at(const Weights& weights);
  void look_at_counters();
  void look_at_files();
  void look_at_remains();
  void look_at_driver();
  bool averages_are(const std::vector<Bytes>& expected) const;
  void differs(const std::string& what);

  void call(const std::function<void()>& fn, bool mends = true);
  void arm();
  void disarm();
  void recover();
  void undo_lost_update();
  void note(const Error& error);
  Bytes fetch(const TensorView& view) const;
  std::vector<Bytes> averages_of_oracle() const;
  bool one_in(uint64_t many) { return random_() % many == 0; }
  bool has(Place place) const { return std::find(places_.begin(), places_.end(), place) != places_.end(); }

  uint64_t seed_;
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
  std::vector<Bytes> before_;            // the oracle's averages before its last update
  std::vector<Replay> graphs_, stale_;   // stale_: of weights that have moved since
  std::map<void*, int> streams_to_end_;  // that the program made, and their devices
  std::string calls_, difference_;
};

}  // namespace shardow::testing
