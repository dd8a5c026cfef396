// The fake driver itself: what is late, what waits for what, and what it refuses, as CUDA does.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "emulation.h"
#include "fake.h"
#include "graph_calls.h"
#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"

namespace shardow {
namespace {

using kernels::cuda::DeviceGuard;
using kernels::cuda::driver;
using kernels::cuda::Event;
using kernels::testing::graph_calls;

enum Refusal {
  kInvalidValue = 1,
  kInvalidHandle = 400,
  kIllegalAddress = 700,
  kUnsupported = 900,
  kInvalidated = 901,
  kUnmatched = 903,
  kIsolation = 905,
  kImplicit = 906,
  kCaptured = 907,
};

/// A number in device memory, which streams write. Calls are those of a user, whose thread has device 0 current.
class FakeDevice : public ::testing::Test {
 protected:
  static constexpr int kSeeds = 50;

  void SetUp() override { driver().push_context(kernels::cuda::used_device(0).context); }
  void TearDown() override {
    void* context = nullptr;
    driver().pop_context(&context);
  }

  void start(std::optional<uint64_t> seed, bool guard = false) {
    fake::reset({.num_devices = 2, .seed = seed, .guard = guard});
    number_ = static_cast<int*>(kernels::cuda::allocate(4, 0));
    pinned_ = static_cast<int*>(kernels::cuda::pin(4, 0));
    driver().set(number_, 0, 4, nullptr);
    driver().synchronize_context();
    *pinned_ = -1;
  }
  static void* stream(int number) { return fake::stream(0, number); }
  void write(int value, void* on) {
    fake::enqueue(0, on, [value, to = number_] { *to = value; });
  }
  int copy(void* on) const { return driver().copy.status(pinned_, number_, 4, on); }

  int* number_ = nullptr;
  int* pinned_ = nullptr;
};

TEST_F(FakeDevice, IsLateUntilTheHostWaits) {
  int late = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    start(static_cast<uint64_t>(seed));
    write(7, stream(1));
    ASSERT_EQ(copy(stream(1)), 0);
    late += *pinned_ == -1 ? 1 : 0;
    driver().synchronize(stream(1));
    ASSERT_EQ(*pinned_, 7);
  }
  EXPECT_GE(late, kSeeds / 2);
}

TEST_F(FakeDevice, ReordersStreamsThatDoNotWaitForEachOther) {
  int after = 0;
  for (int seed = 0; seed < 4 * kSeeds; ++seed) {
    start(static_cast<uint64_t>(seed));
    write(1, stream(1));
    write(2, stream(2));
    driver().synchronize_context();
    ASSERT_EQ(copy(stream(1)), 0);
    driver().synchronize(stream(1));
    after += *pinned_ == 2 ? 1 : 0;
  }
  EXPECT_GT(after, kSeeds / 2);
  EXPECT_LT(after, 4 * kSeeds - kSeeds / 2);
}

TEST_F(FakeDevice, AStreamWaitsForAnEvent) {
  for (int seed = 0; seed < 4 * kSeeds; ++seed) {
    start(static_cast<uint64_t>(seed));
    Event event;
    write(1, stream(1));
    event.record(stream(1));
    event.wait_on(stream(2));
    write(2, stream(2));
    ASSERT_EQ(copy(stream(2)), 0);
    driver().synchronize(stream(2));
    ASSERT_EQ(*pinned_, 2) << seed;
  }
}

TEST_F(FakeDevice, RunsOneStreamAndWhatThatWaitsFor) {
  start(1);
  write(1, stream(1));
  write(2, stream(2));
  fake::run(0, stream(2));
  EXPECT_EQ(*number_, 2);
  EXPECT_EQ(fake::pending(), 1u);
  fake::synchronize();
  EXPECT_EQ(*number_, 1);
}

TEST_F(FakeDevice, RefusesCopiesAndFailsForGoodWhenTold) {
  start(1);
  fake::fail_copy(1, 2);
  EXPECT_EQ(copy(stream(1)), 0);
  EXPECT_EQ(copy(stream(1)), kInvalidValue);
  EXPECT_EQ(copy(stream(1)), kInvalidValue);
  EXPECT_EQ(copy(stream(1)), 0);
  fake::break_after(1);
  static_cast<void>(copy(stream(1)));
  EXPECT_EQ(driver().synchronize.status(stream(1)), kIllegalAddress);
  EXPECT_EQ(copy(stream(1)), kIllegalAddress);
}

TEST_F(FakeDevice, ACopyStaysWithinOneAllocation) {
  start(std::nullopt);
  EXPECT_EQ(kernels::cuda::rest_of_allocation(number_, 0), 4u);
  EXPECT_EQ(kernels::cuda::rest_of_allocation(this, 0), 0u) << "not the device's";
  EXPECT_EQ(driver().copy.status(pinned_, number_, 5, stream(1)), kInvalidValue);
}

TEST_F(FakeDevice, RefusesStreamsAndEventsThatAreGoneOrOfAnotherDevice) {
  start(std::nullopt);
  void* stream = nullptr;
  driver().create_stream(&stream, 1);
  Event event, gone;
  void* const handle = gone.get();
  ASSERT_EQ(driver().destroy_event.status(handle), 0);
  EXPECT_EQ(driver().record.status(handle, stream), kInvalidHandle);
  EXPECT_EQ(driver().wait.status(handle), kInvalidHandle);
  driver().destroy_stream(stream);
  EXPECT_EQ(copy(stream), kInvalidHandle);
  EXPECT_EQ(driver().record.status(event.get(), stream), kInvalidHandle);
  EXPECT_EQ(driver().synchronize.status(stream), kInvalidHandle);
  EXPECT_EQ(driver().record.status(event.get(), fake::stream(1, 1)), kInvalidHandle);
}

/// While a stream of this thread or another one is captured, by the capture's mode.
class FakeCapture : public FakeDevice {
 protected:
  void begin(int mode) {
    start(std::nullopt);
    graph_calls().begin_capture(stream(1), mode);
  }
  bool lost() {
    void* graph = nullptr;
    const int status = graph_calls().end_capture.status(stream(1), &graph);
    EXPECT_EQ(status, graph == nullptr ? kInvalidated : 0);
    if (graph != nullptr) graph_calls().destroy(graph);
    return graph == nullptr;
  }
  /// Returns what a call says, of this thread or of another one, and whether it cost the capture.
  std::pair<int, bool> outcome(int mode, bool elsewhere, const std::function<int()>& call) {
    begin(mode);
    int status = 0;
    const auto with_context = [&] {
      driver().push_context(kernels::cuda::used_device(0).context);
      status = call();
      void* context = nullptr;
      driver().pop_context(&context);
    };
    elsewhere ? std::thread(with_context).join() : with_context();
    return {status, lost()};
  }
};

using kernels::testing::kGlobal;
using kernels::testing::kRelaxed;
using kernels::testing::kThreadLocal;

TEST_F(FakeCapture, IsLostByWhatNoGraphRepeats) {
  start(std::nullopt);
  const std::pair<int, bool> refused{kUnsupported, true}, fine{0, false};
  void* memory = nullptr;
  const std::vector<std::function<int()>> calls = {
      [&] { return driver().allocate.status(&memory, 16); },
      [&] { return driver().allocate_pinned.status(&memory, 16, 0); },
      [&] { return driver().synchronize.status(stream(2)); },
      [&] { return graph_calls().query_stream.status(stream(2)); },
      [&] { return driver().free.status(number_); },
      [&] { return driver().free_pinned.status(pinned_); },
  };
  for (const auto& call : calls) {
    EXPECT_EQ(outcome(kGlobal, false, call), refused);
    EXPECT_EQ(outcome(kGlobal, true, call), refused);
    EXPECT_EQ(outcome(kThreadLocal, false, call), refused);
    EXPECT_EQ(outcome(kThreadLocal, true, call), fine);
    EXPECT_EQ(outcome(kRelaxed, false, call), fine);
    for (const bool elsewhere : {false, true}) {
      const auto after_a_guard = [&] {
        static_cast<void>(DeviceGuard(0));
        return call();
      };
      EXPECT_EQ(outcome(kGlobal, elsewhere, after_a_guard), refused);
      const auto guarded = [&] {
        const DeviceGuard guard(0);
        return call();
      };
      EXPECT_EQ(outcome(kGlobal, elsewhere, guarded), fine);
    }
  }
}

TEST_F(FakeCapture, IsLostInAnyModeByWhatConflictsWithIt) {
  start(std::nullopt);
  Event event;
  for (const int mode : {kGlobal, kRelaxed}) {
    EXPECT_EQ(outcome(mode, false, [&] { return driver().synchronize.status(stream(1)); }),
              (std::pair<int, bool>{kUnsupported, true}));
    EXPECT_EQ(outcome(mode, false, [&] { return driver().synchronize_context.status(); }),
              (std::pair<int, bool>{kUnsupported, true}));
    const auto wait_for_captured = [&] {
      event.record(stream(1));
      return driver().wait.status(event.get());
    };
    EXPECT_EQ(outcome(mode, false, wait_for_captured), (std::pair<int, bool>{kCaptured, true}));
    const auto wait_for_outside = [&] {
      event.record(stream(2));
      return driver().wait_for_event.status(stream(1), event.get(), 0);
    };
    EXPECT_EQ(outcome(mode, false, wait_for_outside), (std::pair<int, bool>{kIsolation, true}));
  }
  void* blocking = nullptr;
  driver().create_stream(&blocking, 0);
  graph_calls().begin_capture(blocking, kRelaxed);
  EXPECT_EQ(copy(nullptr), kImplicit);
  int status = 0;
  driver().is_capturing(blocking, &status);
  EXPECT_EQ(status, 2);
}

TEST_F(FakeCapture, AGraphOfFreedMemoryIsNotReplayed) {
  begin(kGlobal);
  ASSERT_EQ(copy(stream(1)), 0);
  void *graph = nullptr, *replay = nullptr;
  graph_calls().end_capture(stream(1), &graph);
  graph_calls().instantiate(&replay, graph, 0);
  EXPECT_EQ(graph_calls().launch.status(replay, stream(1)), 0);
  kernels::cuda::release(number_, 0);
  EXPECT_EQ(graph_calls().launch.status(replay, stream(1)), kIllegalAddress);
}

using FakeDeviceDeathTest = FakeDevice;

TEST_F(FakeDeviceDeathTest, MemoryOfADeviceIsOutOfTheHostsReach) {
  start(1, true);
  EXPECT_DEATH(*number_ = 1, "");
}

TEST_F(FakeDeviceDeathTest, ACallWithoutAContextAborts) {
  start(1);
  EXPECT_DEATH(std::thread([&] { static_cast<void>(copy(stream(1))); }).join(), "without a current context");
}

TEST_F(FakeDeviceDeathTest, KernelsThatWouldGoWrongAreNotRun) {
  start(1);
  EXPECT_DEATH(fake::run_kernel(64,
                                [] {
                                  if (threadIdx.x % 2 == 0) __syncwarp();
                                }),
               "a lane has ended that others wait for");
  const auto* const misaligned = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(number_) + 4);
  EXPECT_DEATH(fake::run_kernel(64, [&] { static_cast<void>(__ldcs(misaligned)); }), "a misaligned address");
}

}  // namespace
}  // namespace shardow
