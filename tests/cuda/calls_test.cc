// What the CUDA path asks of the driver, and in what order: read from the log of a driver without a device. That
// kernels compute the right numbers is shown by src/kernels/cuda_test.cc, on a device and over the emulation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

#include "fake.h"
#include "file/device.h"
#include "graph_calls.h"
#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"
#include "shardow/average.h"
#include "shardow/error.h"
#include "shardow/group.h"

namespace shardow {
namespace {

using fake::Call;

/// Two float32 tensors on a device: memory that the fake runtime gave.
class CudaCalls : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 48;

  void SetUp() override {
    fake::reset(4);
    ASSERT_TRUE(kernels::cuda::available());
  }

  TensorView view(const std::string& name, int index, void* on) {
    memory_.push_back(kernels::cuda::allocate(kRows * 4, index));
    std::memset(memory_.back(), 0, kRows * 4);
    return {name, DType::kF32, Region::whole({kRows}), memory_.back(), {Device::Kind::kCuda, index, on}};
  }

  std::vector<TensorView> views(int index, void* on) { return {view("a", index, on), view("b", index, on)}; }

  std::vector<void*> memory_;
};

size_t place(const std::vector<Call>& calls, const std::string& what, void* on) {
  const auto found =
      std::find_if(calls.begin(), calls.end(), [&](const Call& one) { return one.what == what && one.stream == on; });
  return static_cast<size_t>(found - calls.begin());
}

/// Everything that names a stream names this one.
void expect_all_on(const std::vector<Call>& calls, void* on, int device) {
  EXPECT_FALSE(calls.empty());
  for (const Call& call : calls) {
    EXPECT_EQ(call.device, device) << call.what;
    if (call.what != "host waits") {
      EXPECT_EQ(call.stream, on) << call.what;
    }
  }
}

TEST_F(CudaCalls, AnUpdateIsOneLaunchOnTheStreamOfTheViewsAndNothingElse) {
  Average ema(views(1, fake::stream(1, 1)));
  fake::clear();
  for (int step = 0; step < 3; ++step) ema.update();
  const auto calls = fake::calls();
  ASSERT_EQ(calls.size(), 3u);
  for (const Call& call : calls) {
    EXPECT_EQ(call.what, "update");
    EXPECT_EQ(call.subject, nullptr) << "its step is an argument";
  }
  expect_all_on(calls, fake::stream(1, 1), 1);
}

TEST_F(CudaCalls, AllAveragesBeginInOneLaunch) {
  Average ema(views(0, fake::stream(0, 1)), {.schedules = {Schedule::constant(0.9), Schedule::constant(0.99)}});
  fake::clear();
  ema.reset();
  const auto calls = fake::calls();
  EXPECT_EQ(std::count_if(calls.begin(), calls.end(), [](const Call& call) { return call.what == "launch"; }), 1);
  EXPECT_TRUE(fake::calls_of("copy").size() <= 1) << "of the tally alone";
}

TEST_F(CudaCalls, AnotherStreamWaitsForTheLastOneOnTheDevice) {
  Average ema(views(0, fake::stream(0, 1)));
  ema.update();
  fake::clear();
  ema.set_stream(0, fake::stream(0, 2));
  ema.update();
  const auto calls = fake::calls();
  const size_t recorded = place(calls, "record", fake::stream(0, 1)),
               waited = place(calls, "stream waits", fake::stream(0, 2));
  ASSERT_LT(recorded, calls.size());
  ASSERT_LT(waited, calls.size());
  EXPECT_LT(recorded, waited);
  EXPECT_EQ(calls[recorded].subject, calls[waited].subject);
  EXPECT_LT(waited, place(calls, "update", fake::stream(0, 2)));
  EXPECT_TRUE(fake::calls_of("host waits").empty());
  fake::clear();
  ema.set_stream(0, fake::stream(0, 2));  // the same again costs nothing
  ema.set_stream(3, fake::stream(3, 7));  // not a device of these views
  EXPECT_TRUE(fake::calls().empty());
}

TEST_F(CudaCalls, EverythingFollowsTheStream) {
  std::vector<TensorView> bound = views(2, fake::stream(2, 1));
  Average ema(bound, {.schedules = {Schedule::constant(0.9)}, .dtype = DType::kF64});
  ema.set_stream(2, fake::stream(2, 5));
  fake::clear();
  ema.update();
  ema.reset();
  static_cast<void>(ema.stats());
  expect_all_on(fake::calls(), fake::stream(2, 5), 2);
  EXPECT_EQ(ema.views()[0].device.stream, fake::stream(2, 5));
}

TEST_F(CudaCalls, BindingViewsOfAnotherStreamFollowsItToo) {
  std::vector<TensorView> bound = views(0, fake::stream(0, 1));
  Average ema(bound);
  for (TensorView& one : bound) one.device.stream = fake::stream(0, 2);
  fake::clear();
  ema.update(bound);
  EXPECT_EQ(fake::calls_of("update")[0].stream, fake::stream(0, 2));
  EXPECT_TRUE(fake::calls_of("malloc").empty()) << "nothing moved, so no table is made anew";
  bound[1].device.stream = fake::stream(0, 3);
  EXPECT_THROW(ema.bind(bound), Error);
}

TEST_F(CudaCalls, ACaptureIsLaunchedByPointerAndNotCounted) {
  Average ema(views(0, fake::stream(0, 1)), {.schedules = {Schedule::constant(0.9)}, .rounding = Rounding::kNearest});
  ema.update();
  fake::capture(fake::stream(0, 1), true);
  fake::clear();
  EXPECT_FALSE(ema.update().applied);
  const auto captured = fake::calls();
  fake::capture(fake::stream(0, 1), false);
  ASSERT_EQ(captured.size(), 1u);
  ASSERT_NE(captured[0].subject, nullptr);
  EXPECT_EQ(ema.stats().step, 1);

  const auto* const latest = static_cast<const kernels::Step*>(captured[0].subject);
  EXPECT_EQ(latest->num_averages, 0) << "a replay that nobody prepared does nothing";
  for (int64_t step = 2; step < 40; ++step) {  // more than there are pinned slots
    fake::clear();
    EXPECT_TRUE(ema.prepare_replay().applied);
    EXPECT_EQ(latest->num_averages, 1);
    EXPECT_EQ(latest->step, step);
    EXPECT_EQ(latest->averages[0].decay, 0.9);
    EXPECT_EQ(ema.stats().step, step);
    EXPECT_TRUE(fake::calls_of("update").empty());
    EXPECT_EQ(fake::calls_of("copy")[0].stream, fake::stream(0, 1));
  }
}

TEST_F(CudaCalls, AReplayBetweenUpdatesDoesNothing) {
  Average ema(views(0, fake::stream(0, 1)), {.schedules = {Schedule::constant(0.9)}, .update_every = 3});
  fake::capture(fake::stream(0, 1), true);
  ema.update();
  const auto* const latest = static_cast<const kernels::Step*>(fake::calls_of("update")[0].subject);
  fake::capture(fake::stream(0, 1), false);
  std::vector<int> averages;
  for (int step = 1; step <= 6; ++step) {
    ema.prepare_replay();
    averages.push_back(latest->num_averages);
  }
  EXPECT_EQ(averages, (std::vector<int>{0, 0, 1, 0, 0, 1}));
  EXPECT_EQ(ema.stats().updates, 2);
}

/// A graph whose weights moved, or whose Average is gone, writes nothing and reads nothing that was freed.
TEST_F(CudaCalls, AGraphOutlivesWhatItWasCapturedOf) {
  using kernels::testing::graph_calls;
  const kernels::cuda::DeviceGuard guard(0);
  void* const on = fake::stream(0, 1);
  std::vector<TensorView> bound = views(0, on);
  auto ema = std::make_unique<Average>(bound, AverageOptions{.schedules = {Schedule::constant(0.5)}});
  void *graph = nullptr, *replay = nullptr;
  graph_calls().begin_capture(on, kernels::testing::kGlobal);
  ema->update();
  graph_calls().end_capture(on, &graph);
  graph_calls().instantiate(&replay, graph, 0);

  auto* const average = static_cast<const float*>(ema->views()[0].data);
  std::fill_n(static_cast<float*>(bound[0].data), kRows, 2.0f);
  ema->prepare_replay();
  graph_calls().launch(replay, on);
  EXPECT_EQ(average[0], 1.0f);

  std::vector<TensorView> moved = views(0, on);
  ema->bind(moved);
  for (TensorView& view : bound) kernels::cuda::release(view.data, 0);
  memory_.erase(memory_.begin(), memory_.begin() + 2);
  graph_calls().launch(replay, on);
  EXPECT_EQ(average[0], 1.0f);
  try {
    ema->prepare_replay();
    FAIL() << "no graph reads these weights";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("capture update() anew"), std::string::npos) << error.what();
  }
  EXPECT_EQ(ema->stats().step, 1);

  graph_calls().begin_capture(on, kernels::testing::kGlobal);
  ema->update();
  void *anew = nullptr, *again = nullptr;
  graph_calls().end_capture(on, &anew);
  graph_calls().instantiate(&again, anew, 0);
  std::fill_n(static_cast<float*>(moved[0].data), kRows, 3.0f);
  ema->prepare_replay();
  graph_calls().launch(again, on);
  EXPECT_EQ(average[0], 2.0f);
  ema.reset();
  graph_calls().launch(again, on);
  fake::synchronize();
}

TEST_F(CudaCalls, AnAverageThatGoesWhileItsStreamIsCapturedLosesNoCapture) {
  using kernels::testing::graph_calls;
  const kernels::cuda::DeviceGuard guard(0);
  void* const on = fake::stream(0, 1);
  auto ema = std::make_unique<Average>(views(0, on));
  void *graph = nullptr, *first = nullptr, *second = nullptr;
  graph_calls().begin_capture(on, kernels::testing::kGlobal);
  ema->update();
  graph_calls().end_capture(on, &graph);
  graph_calls().instantiate(&first, graph, 0);
  ema->prepare_replay();
  graph_calls().begin_capture(on, kernels::testing::kGlobal);
  ema->update();
  ema.reset();
  graph_calls().end_capture(on, &graph);
  graph_calls().instantiate(&second, graph, 0);
  graph_calls().launch(first, on);
  graph_calls().launch(second, on);
}

TEST_F(CudaCalls, OnlyTheDevicesInUseGetContexts) {
  {
    Average ema(views(3, fake::stream(3, 1)));
    std::thread other([&] {  // a thread's current device is 0 until it says otherwise
      ema.update();
      static_cast<void>(ema.stats());
    });
    other.join();
    std::thread freeing([moved = std::move(ema)] {});
    freeing.join();
  }
  file::Pinned pinned;
  std::thread copying([&] {
    pinned.copy_from(static_cast<const std::byte*>(memory_[0]), 64, {Device::Kind::kCuda, 3, fake::stream(3, 1)});
  });
  copying.join();
  pinned.finish();
  for (void* memory : memory_) kernels::cuda::release(memory, 3);
  EXPECT_EQ(fake::contexts(), std::vector<int>{3});
}

TEST_F(CudaCalls, TheCallersDeviceIsCurrentAgainWhereItHasAContext) {
  memory_.push_back(kernels::cuda::allocate(16, 0));
  Average ema(views(2, fake::stream(2, 1)));
  ema.update();
  fake::clear();
  memory_.push_back(kernels::cuda::allocate(16, 0));
  EXPECT_EQ(fake::calls()[0].device, 0);
  EXPECT_EQ(fake::contexts(), (std::vector<int>{0, 2}));
}

TEST_F(CudaCalls, NoMemoryIsSaidAsSuchAndLeavesNothingBehind) {
  const std::vector<TensorView> bound = views(0, fake::stream(0, 1));
  const size_t before = fake::allocated();
  int failures = 0;
  for (int number = 0;; ++number, ++failures) {
    fake::fail_allocation(number);
    try {
      Average ema(bound);
      break;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kOutOfMemory) << error.what();
    }
    EXPECT_EQ(fake::allocated(), before) << "after failure " << number;
  }
  EXPECT_GE(failures, 5);
}

TEST_F(CudaCalls, NothingSpins) {
  Average ema(views(0, fake::stream(0, 1)));
  ema.update();
  static_cast<void>(ema.stats());
  file::Pinned pinned;
  pinned.copy_from(static_cast<const std::byte*>(memory_[0]), 64, {Device::Kind::kCuda, 0, fake::stream(0, 1)});
  pinned.finish();
  EXPECT_TRUE(fake::calls_of("event that spins").empty());
  EXPECT_FALSE(fake::calls_of("event that sleeps").empty());
}

TEST_F(CudaCalls, PinnedMemoryIsUsedAgain) {
  const Device device{Device::Kind::kCuda, 1, fake::stream(1, 1)};
  memory_.push_back(kernels::cuda::allocate(64, 1));
  const auto copy = [&] {
    file::Pinned first, second;
    first.copy_from(static_cast<const std::byte*>(memory_[0]), 64, device);
    second.copy_from(static_cast<const std::byte*>(memory_[0]), 64, device);
  };
  copy();
  fake::clear();
  for (int i = 0; i < 20; ++i) copy();
  EXPECT_TRUE(fake::calls_of("pin").empty());
  EXPECT_TRUE(fake::calls_of("unpin").empty());
}

TEST_F(CudaCalls, ReplicasOfDeviceMemoryAreRefused) {
  auto groups = threads(2);
  AverageOptions options;
  options.replicas = groups[0].get();
  try {
    Average ema(views(0, fake::stream(0, 1)), options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("'a'"), std::string::npos);
  }
}

}  // namespace
}  // namespace shardow
