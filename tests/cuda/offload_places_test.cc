// Random programs with weights and averages in several places of one Average: weights on the host and on devices,
// averages beside them and on the host, options.overlap, weights that are not finite, copies that are refused.
// program.h draws more calls, of weights in one place.
#include <gtest/gtest.h>

#include "drawn_turns.h"
#include "offload_fixture.h"

namespace shardow {
namespace {

class Places {
 public:
  explicit Places(uint64_t seed) : random_(seed), faulty_(one_in(3)) {
    std::vector<Spec> specs;
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      for (Spec& spec : model(dtype, 2)) {
        if (!one_in(3)) continue;
        spec.name = std::string(dtype_name(dtype)) + spec.name;
        specs.push_back(spec);
      }
    }
    if (one_in(4)) specs.push_back({"large", DType::kBF16, Region::whole({100, 1501}).window(7, 149000), 1});
    AverageOptions options = options_of(1 + random_() % 3, one_in(2) ? 4096 : int64_t{1} << 20);
    options.non_finite = one_in(3) ? NonFinite::kRaise : NonFinite::kHold;
    options.rounding = one_in(2) ? Rounding::kStochastic : Rounding::kAuto;
    options.overlap = one_in(4);
    Exceptions exceptions;
    for (size_t i = 0; i < specs.size(); ++i) {
      if (one_in(4)) {
        exceptions.on_host.push_back(i);
      } else if (one_in(4) && !options.overlap) {
        exceptions.beside.push_back(i);
      }
    }
    specs_ = specs;
    twins_.emplace(specs, options, seed, exceptions);
  }

  void run() {
    for (int left = 12; left > 0 && !::testing::Test::HasFatalFailure(); --left) {
      switch (random_() % 8) {
        case 0: swap(); break;
        case 1: twins_->expect_equal(); break;
        case 2: twins_->use_stream(0, stream_of(0, static_cast<int>(random_() % 3))); break;
        case 3:
          twins_->offloaded->set_state(twins_->offloaded->state());
          twins_->resident->set_state(twins_->resident->state());
          break;
        case 4:
          if (one_in(2)) restart();
          break;
        default: train();
      }
    }
    faulty_ = false;
    train();  // an update that was not made is made up for
    twins_->expect_equal("at the end");
    EXPECT_EQ(twins_->offloaded->state(), twins_->resident->state());
  }

 private:
  bool one_in(uint64_t many) { return random_() % many == 0; }

  void arm() {
    if (faulty_ && one_in(2)) fake::fail_copy(static_cast<int>(random_() % 20), 1 + static_cast<int>(random_() % 4));
  }

  void train() {
    twins_->step();
    if (one_in(6) && !specs_.empty()) poison();
    const int64_t updates = twins_->offloaded->stats().updates;
    arm();
    ++step_;
    static_cast<void>(error_of([&] { twins_->offloaded->update(step_); }));
    while (faulty_ && !error_of([&] { twins_->offloaded->wait(); }).empty()) {
    }
    fake::fail_copy(-1);
    if (made(updates)) static_cast<void>(error_of([&] { twins_->resident->update(step_); }));
  }

  /// An update, since there were so many. Says what it met, where nobody has asked yet.
  bool made(int64_t updates) {
    static_cast<void>(error_of([&] { twins_->offloaded->wait(); }));
    return twins_->offloaded->stats().updates > updates;
  }

  void poison() {
    const size_t tensor = random_() % specs_.size();
    if (specs_[tensor].dtype != DType::kF32 || specs_[tensor].region.size() == 0) return;
    twins_->poison(tensor, random_() % static_cast<uint64_t>(specs_[tensor].region.size()));
  }

  void swap() {
    const size_t k = random_() % twins_->resident->size();
    twins_->offloaded->finish_reading();
    if (one_in(2)) twins_->step();
    arm();
    while (!error_of([&] { twins_->offloaded->swap_in(k); }).empty()) {
      while (!error_of([&] { twins_->offloaded->swap_out(); }).empty()) {
      }
    }
    fake::fail_copy(-1);
    twins_->resident->swap_in(k);
    twins_->expect_equal_weights("swapped in");
    arm();
    while (!error_of([&] { twins_->offloaded->swap_out(); }).empty()) {
    }
    fake::fail_copy(-1);
    twins_->resident->swap_out();
    twins_->expect_equal_weights("swapped out");
  }

  void restart() {
    step_ = 0;
    average::Driver::restart(*twins_->offloaded);
    average::Driver::restart(*twins_->resident);
  }

  std::mt19937_64 random_;
  bool faulty_;
  int64_t step_ = 0;
  std::vector<Spec> specs_;
  std::optional<Twins> twins_;
};

TEST(OffloadPlaces, OneAverageOfAllOfThem) {
  const char *const one = std::getenv("SHARDOW_SEED"), *const all = std::getenv("SHARDOW_ALL");
  const uint64_t first = one != nullptr ? std::strtoull(one, nullptr, 10) : 1;
  const uint64_t count = one != nullptr ? 1 : all != nullptr ? 3000 : 100;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("to see it alone: SHARDOW_SEED=" + std::to_string(seed) +
                 " offload_test --gtest_filter=OffloadPlaces.*");
    fake::reset({.num_devices = 2, .seed = seed, .log = false});
    const fake::DrawnTurns turns(seed);
    Places(seed).run();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace shardow
