// Calls of the driver that the CUDA path makes, read from the log of a driver without a device. That averages are right
// whatever is called is shown by random programs (programs_test.cc), kernels' numbers by src/kernels/cuda_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <latch>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "base/allocations_fixture.h"
#include "fake.h"
#include "file/device.h"
#include "graph_calls.h"
#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"
#include "kernels/memory.h"
#include "shardow/average.h"
#include "shardow/group.h"
#include "tensor/dtype.h"

namespace shardow {
namespace {

constexpr int kTensors = 300;
constexpr int64_t kLarge = 1 << 20;  // enough for threads

using Numbers = std::map<std::string, int>;
using kernels::testing::Current;
using kernels::testing::error_of;
using kernels::testing::kGlobal;
using kernels::testing::kRelaxed;
using kernels::testing::Recording;

/// Many small tensors of a device, of float32 and bfloat16 by turns.
class CudaCalls : public ::testing::Test {
 protected:
  void SetUp() override { fake::reset(fake::Options{.num_devices = 2}); }
  void TearDown() override {
    ema_.reset();
    fake::synchronize();
    views_.clear();
    memory_.clear();
  }

  static Device device(int index = 0) { return {Device::Kind::kCuda, index, fake::stream(index, 1)}; }
  TensorView hold(int number, const Device& device, const Region& region = Region::whole({7}),
                  DType dtype = DType::kF32) {
    const auto bytes = static_cast<size_t>(byte_size(dtype, region.size()));
    return {"p" + std::to_string(number), dtype, region, memory_.emplace_back(bytes, device).data(), device};
  }
  void begin(const std::vector<TensorView>& weights, const std::vector<TensorView>& averages,
             const AverageOptions& options = {}) {
    ema_ = std::make_unique<Average>(weights, std::vector<std::vector<TensorView>>{averages}, options);
  }

  void make(bool on_host = false, AverageOptions options = {}) {
    std::vector<TensorView> averages;
    for (int i = 0; i < kTensors; ++i) {
      Region region = Region::whole({i == 1 && on_host ? kLarge : 7});
      if (i == 0) region = Region::grid({7, 3}, {{{0, 7}}, {{1, 2}}});  // whose noise is drawn by runs
      views_.push_back(hold(i, device(), region, i % 2 == 0 ? DType::kF32 : DType::kBF16));
      if (on_host) averages.push_back(hold(i, Device{}, region));
    }
    if (on_host) return begin(views_, averages, options);
    ema_ = std::make_unique<Average>(views_, options);
  }

  /// How often `call` asks for what.
  static Numbers calls_of(const std::function<void()>& call) {
    fake::world().log.clear();
    call();
    Numbers numbers;
    for (const fake::Call& asked : fake::world().log) ++numbers[asked.what];
    return numbers;
  }

  Numbers captured() {
    Numbers calls;
    Recording({{0, fake::stream(0, 1)}}, kGlobal, [&] { calls = calls_of([&] { ema_->update(); }); });
    return calls;
  }

  const Numbers follows_{{"record", 1}, {"stream waits", 1}};

  std::vector<kernels::Memory> memory_;
  std::vector<TensorView> views_;
  std::unique_ptr<Average> ema_;
};

TEST_F(CudaCalls, AreFewWhateverTheNumberOfTensors) {
  make();
  EXPECT_EQ(calls_of([&] { ema_->update(); }), (Numbers{{"update", 1}}));
  EXPECT_EQ(fake::world().log[0].stream, fake::stream(0, 1));
  const int swaps = (kTensors + 125) / 126;
  for (const TensorView& view : views_) *static_cast<char*>(view.data) = 1;  // which averages do not have
  static_cast<void>(calls_of([&] { ema_->swap_in(); }));                     // loads the kernel
  EXPECT_EQ(calls_of([&] { ema_->swap_out(); }), (Numbers{{"launch", swaps}}));
  for (const TensorView& view : views_) EXPECT_EQ(*static_cast<const char*>(view.data), 1) << view.name;
  EXPECT_EQ(calls_of([&] { ema_->swap_in(); }), (Numbers{{"launch", swaps}}));
  ema_->swap_out();
  EXPECT_EQ(calls_of([&] { ema_->reset(); })["launch"], 1);
  EXPECT_LE(fake::calls_of("copy").size(), 1u) << "of the tally alone";
  EXPECT_EQ(calls_of([&] { ema_->set_stream(0, fake::stream(0, 2)); }), follows_);
  EXPECT_EQ(calls_of([&] { ema_->set_stream(0, fake::stream(0, 2)); }), Numbers{});
  EXPECT_EQ(calls_of([&] { ema_->set_stream(1, fake::stream(1, 1)); }), Numbers{}) << "of no view's device";
  EXPECT_EQ(calls_of([&] { ema_->bind(views_); }), follows_) << "nothing moved, so no table is made anew";
}

TEST_F(CudaCalls, OfTheFirstStepThatDrawsNoiseAreTheLaunchAlone) {
  make(false, {.rounding = Rounding::kStochastic});
  EXPECT_EQ(calls_of([&] { ema_->update(); }), (Numbers{{"update", 1}})) << "nothing is loaded, which may wait";
}

TEST_F(CudaCalls, AskForKernelsOfTheTablesDtypes) {
  make();
  for (const fake::Kernel& kernel : fake::world().kernels)
    EXPECT_EQ(kernel.name.find("double"), std::string::npos) << kernel.name;
}

TEST_F(CudaCalls, AnUpdateOfAveragesOnTheHostMakesNothingAnew) {
  for (const int64_t ring_bytes : {int64_t{1} << 16, int64_t{1} << 26}) {
    fake::reset(fake::Options{.num_devices = 2});
    make(true, {.rounding = Rounding::kStochastic, .num_threads = 2, .ring_bytes = ring_bytes});
    const auto update = [&] {
      ema_->update();
      ema_->finish_reading();
      ema_->wait();
    };
    update();  // starts the threads
    const auto calls = [&] {
      Numbers numbers = calls_of(update);
      numbers.erase("stream waits");  // one more where a thread of copies is the later one
      return numbers;
    };
    const Numbers first = calls();
    for (const char* made : {"event that sleeps", "event that spins", "stream", "pin", "malloc", "launch"})
      EXPECT_EQ(first.count(made), 0u) << made;
    base::uncounted = &fake::inside;
    EXPECT_EQ(base::allocations_of([&] {
                for (int i = 0; i < 5; ++i) update();
              }),
              0);
    base::uncounted = nullptr;
    EXPECT_EQ(calls(), first);
    TearDown();
  }
}

TEST_F(CudaCalls, CopiesOfNeighboursInOneAllocationAloneAreOne) {
  auto* const memory = static_cast<float*>(kernels::cuda::allocate(84, 0));
  TensorView first = hold(0, device()), second = hold(1, device());
  first.data = memory + 7;
  second.data = memory + 14;
  for (const int copies : {1, 2}) {
    begin({first, second}, {hold(0, Device{}), hold(1, Device{})});
    EXPECT_EQ(calls_of([&] {
                ema_->update();
                ema_->wait();
              })["copy"],
              copies);
    if (copies == 1) fake::world().memory.split(memory, 56);
  }
}

TEST_F(CudaCalls, AnUpdateThatFailedHasNoCopyOnItsWay) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    fake::reset({.num_devices = 2, .seed = seed});
    make(true);
    fake::fail_copy(100, -1);
    ema_->update();
    EXPECT_NE(error_of([&] { ema_->wait(); }), "");
    fake::fail_copy(-1);
    EXPECT_EQ(fake::world().streams.pending(), 0u) << "the weights may be freed now";
    TearDown();
  }
}

TEST_F(CudaCalls, AnUpdateThatFailedIsToldWhereTheNextOneIsRefused) {
  make(true, {.ring_bytes = int64_t{1} << 26});
  fake::fail_copy(100, 1);
  ema_->update(1);
  const auto error = [&] { return error_of([&] { ema_->update(1); }); };
  EXPECT_NE(error().find("the update of step 1 was not made"), std::string::npos);
  EXPECT_NE(error().find("step 1 has been counted already"), std::string::npos);
}

TEST_F(CudaCalls, TheStreamWaitsForTheLastCopyAndTheHostDoesNot) {
  fake::reset(fake::Options{.threads = true});
  make(true);
  std::latch held(1);
  fake::enqueue(0, fake::stream(0, 1), [&] { held.wait(); });
  fake::world().log.clear();
  ema_->update();
  ema_->finish_reading();  // nothing has been copied yet
  {
    const auto lock = fake::locked();
    EXPECT_GT(fake::world().streams.pending(), 0u);
  }
  EXPECT_EQ(fake::calls_of("stream waits").back().stream, fake::stream(0, 1));
  held.count_down();
  ema_->wait();
}

TEST_F(CudaCalls, AnotherStreamWaitsForTheCopiesOfAveragesOnTheHost) {
  make(true);
  ema_->update();
  ema_->finish_reading();  // the stream before waits for the last copy, and the other one for that stream
  ema_->wait();
  EXPECT_EQ(calls_of([&] { ema_->set_stream(0, fake::stream(0, 2)); }), follows_);
  EXPECT_EQ(fake::calls_of("stream waits").back().stream, fake::stream(0, 2));
  EXPECT_EQ(fake::calls_of("record").back().stream, fake::stream(0, 1));
}

TEST_F(CudaCalls, ASwapGoesBackOnTheStreamThatIsFollowedByThen) {
  make();
  ema_->swap_in();
  ema_->set_stream(0, fake::stream(0, 2));
  fake::world().log.clear();
  ema_->swap_out();
  const auto launches = fake::calls_of("launch");
  ASSERT_FALSE(launches.empty());
  for (const fake::Call& launch : launches) EXPECT_EQ(launch.stream, fake::stream(0, 2));
}

TEST_F(CudaCalls, MemoryThatWasHandedOnGoesBackToWhereItIsFrom) {
  {
    kernels::Memory pinned = kernels::Memory::pinned(64, device()), on_host(64, Device{}), on_device(64, device());
    fake::world().log.clear();
    std::swap(pinned, on_host);
    on_device = std::move(on_host);
  }
  EXPECT_EQ(fake::calls_of("unpin").size(), 1u);
  EXPECT_EQ(fake::calls_of("free").size(), 1u);
}

TEST_F(CudaCalls, AnUpdateInACaptureTakesItsStepFromTheDevice) {
  make(false, {.schedules = {Schedule::constant(0.99999)}, .start_step = 40});
  ema_->update();
  EXPECT_EQ(captured(), (Numbers{{"update", 1}}));
  for (int64_t step = 2; step < 40; ++step)  // more than there are pinned slots
    EXPECT_EQ(calls_of([&] { ema_->prepare_replay(); })["update"], 0);
  static_cast<void>(ema_->prepare_replay());
  EXPECT_NE(error_of([&] { ema_->prepare_replay(); }).find("has no launch for that; capture update() anew"),
            std::string::npos)
      << "the first step that rounds stochastically";
  EXPECT_EQ(ema_->stats().step, 40);
  EXPECT_EQ(captured(), (Numbers{{"update", 2}}));
  ema_->prepare_replay();
  EXPECT_EQ(ema_->stats().step, 41);
}

TEST_F(CudaCalls, ANewStreamComesAfterTheWorkOfOneThatIsGone) {
  make();
  std::optional<kernels::cuda::Stream> stream(0);
  ema_->set_stream(0, stream->get());
  ema_->update();
  stream.reset();
  EXPECT_EQ(calls_of([&] { ema_->set_stream(0, fake::stream(0, 2)); })["host waits for device"], 1);
}

TEST_F(CudaCalls, AveragesThatBeginAgainWithinACaptureAreRefused) {
  make();
  Recording({{0, fake::stream(0, 1)}}, kGlobal,
            [&] { EXPECT_NE(error_of([&] { ema_->reset(); }).find("outside of a capture"), std::string::npos); });
  ema_->reset();
}

TEST_F(CudaCalls, AReplayIsPreparedOnEveryDeviceOrOnNone) {
  void *const first = fake::stream(0, 1), *const second = fake::stream(1, 1);
  for (const int index : {0, 0, 1, 1}) views_.push_back(hold(index, device(index)));
  begin({views_[0], views_[2]}, {views_[1], views_[3]});
  const auto update = [&] { ema_->update(); };
  const auto prepare = [&] { ema_->prepare_replay(); };
  const auto try_to_prepare = [&] {
    EXPECT_EQ(calls_of([&] { EXPECT_NE(error_of(prepare).find("on device 1"), std::string::npos); }), Numbers{});
  };
  Recording({{0, first}}, kRelaxed, update);
  try_to_prepare();
  Recording({{0, first}, {1, second}}, kRelaxed, update);
  Recording({{1, second}}, kRelaxed, try_to_prepare);
  EXPECT_EQ(ema_->stats().step, 0);
  EXPECT_EQ(calls_of(prepare)["copy"], 2);
}

/// More of them than there are pinned steps: a host that runs ahead of a late device waits until it has read one.
TEST_F(CudaCalls, EachOfManyReplaysInARowTakesItsOwnStep) {
  const AverageOptions options{.schedules = {Schedule::mean()}};
  for (uint64_t seed = 0; seed <= 5; ++seed) {
    const bool threads = seed == 5;
    fake::reset({.seed = threads ? std::nullopt : std::optional(seed), .threads = threads});
    void* const stream = fake::stream(0, 1);
    std::vector<float> weights(7);
    Average oracle(std::vector{TensorView{"p", DType::kF32, Region::whole({7}), weights.data()}}, options);
    views_ = {hold(0, device()), hold(0, device())};
    auto *const on_device = static_cast<float*>(views_[0].data), *const average = static_cast<float*>(views_[1].data);
    std::fill_n(on_device, 7, 0.0f);
    begin({views_[0]}, {views_[1]}, options);
    fake::synchronize();
    std::fill_n(weights.begin(), 7, 1.0f);
    std::fill_n(on_device, 7, 1.0f);
    const Recording recording({{0, stream}}, kGlobal, [&] { ema_->update(); });
    if (threads) fake::enqueue(0, stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
    for (int step = 0; step < 50; ++step) {
      ema_->prepare_replay();
      ASSERT_EQ(recording.launch({{0, stream}}), 0);
      oracle.update();
    }
    fake::synchronize();
    const auto* const wanted = static_cast<const float*>(oracle.views()[0].data);
    EXPECT_TRUE(std::equal(average, average + 7, wanted)) << seed << ": " << *average << " and " << *wanted;
    TearDown();
  }
}

TEST_F(CudaCalls, AReplayThatIsRefusedLeavesTheErrorOfTheUpdateBefore) {
  make(true);
  fake::fail_copy(0, -1);
  ema_->update();
  EXPECT_NE(error_of([&] { ema_->prepare_replay(); }).find("prepare_replay(): the averages are on the host"),
            std::string::npos);
  EXPECT_NE(error_of([&] { ema_->wait(); }), "");
  fake::fail_copy(-1);
}

/// Also where its stream is gone, or captured for others meanwhile: what is freed is freed behind all that was given
/// it.
TEST_F(CudaCalls, TheEndWaitsForWhatIsUnderWay) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    fake::reset({.num_devices = 2, .seed = seed});
    const Current current(0);
    make();
    captured();
    void* stream = fake::stream(0, 1);
    if (seed % 2 == 0) {
      kernels::cuda::driver().create_stream(&stream, kernels::cuda::kNonBlocking);
      ema_->set_stream(0, stream);
    }
    ema_->prepare_replay();
    if (seed % 2 == 0) {
      ema_->reset();
      kernels::cuda::driver().destroy_stream(stream);
      ema_.reset();
    } else {
      Recording({{0, stream}}, kGlobal, [&] { ema_.reset(); });
    }
    TearDown();
  }
}

TEST_F(CudaCalls, PinnedMemoryOfFilesIsUsedAgain) {
  make();
  const auto copy = [&] {
    file::Pinned first, second;
    first.copy_from(static_cast<const std::byte*>(views_[0].data), 28, views_[0].device);
    second.copy_from(static_cast<const std::byte*>(views_[0].data), 28, views_[0].device);
  };
  copy();
  const auto calls = calls_of([&] {
    for (int i = 0; i < 20; ++i) copy();
  });
  EXPECT_EQ(calls.count("pin") + calls.count("unpin"), 0u);
}

TEST_F(CudaCalls, RefusalsNameTheTensorOrTheNumber) {
  auto groups = threads(2);
  AverageOptions options;
  options.replicas = groups[0].get();
  EXPECT_NE(error_of([&] { make(false, options); }).find("'p0'"), std::string::npos);
  ema_ = std::make_unique<Average>(views_, AverageOptions{});
  views_[1].device.stream = fake::stream(0, 3);
  EXPECT_NE(error_of([&] { ema_->bind(views_); }), "") << "views of two streams";
}

}  // namespace
}  // namespace shardow
