// The fake driver itself: what is late, what waits for what, and what it refuses, as CUDA does.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "emulation.h"
#include "graph_calls.h"
// After the language's words.
#include "fake.h"
#include "kernels/cuda.h"
#include "kernels/cuda_access.cuh"
#include "kernels/cuda_driver.h"

namespace shardow {
namespace {

using kernels::cuda::DeviceGuard;
using kernels::cuda::driver;
using kernels::testing::Current;
using kernels::testing::Recording;

using namespace fake;  // its results

/// A number in device memory, which streams write. Calls are those of a user, whose thread has device 0 current.
class FakeDevice : public ::testing::Test {
 protected:
  void start(std::optional<uint64_t> seed, bool guard = false) {
    fake::reset({.num_devices = 2, .seed = seed, .guard = guard});
    number_ = static_cast<int*>(kernels::cuda::allocate(4, 0));
    pinned_ = static_cast<int*>(kernels::cuda::allocate(4, 0, true));
    driver().set(number_, 0, 4, nullptr);
    driver().synchronize_context();
    *pinned_ = -1;
  }
  static void* stream(int number) { return fake::stream(0, number); }
  void write(int value, void* on) {
    fake::enqueue(0, on, [value, to = number_] { *to = value; });
  }
  int copy(void* on) const { return driver().copy.status(pinned_, number_, 4, on); }

  Current current_{0};
  int* number_ = nullptr;
  int* pinned_ = nullptr;
};

TEST_F(FakeDevice, RefusesCopiesAndFailsForGoodWhenTold) {
  start(1);
  EXPECT_EQ(kernels::cuda::rest_of_allocation(number_, 0), 4u);
  EXPECT_EQ(kernels::cuda::rest_of_allocation(this, 0), 0u) << "not the device's";
  EXPECT_EQ(driver().copy.status(pinned_, number_, 5, stream(1)), kInvalidValue) << "beyond its allocation";
  fake::fail_copy(1, 2);
  for (const int status : {0, int{kInvalidValue}, int{kInvalidValue}, 0}) EXPECT_EQ(copy(stream(1)), status);
  fake::world().streams.until_broken = 1;
  static_cast<void>(copy(stream(1)));
  EXPECT_EQ(driver().synchronize.status(stream(1)), kIllegalAddress);
  EXPECT_EQ(copy(stream(1)), kIllegalAddress);
}

TEST_F(FakeDevice, RefusesStreamsAndEventsThatAreGoneOrOfAnotherDevice) {
  start(std::nullopt);
  void* stream = nullptr;
  driver().create_stream(&stream, 1);
  kernels::cuda::Event event(0), gone(0);
  int captured = 0;
  ASSERT_EQ(driver().destroy_event.status(gone.get()), 0);
  EXPECT_EQ(driver().record.status(gone.get(), stream), kInvalidHandle);
  EXPECT_EQ(driver().wait.status(gone.get()), kInvalidHandle);
  driver().destroy_stream(stream);
  void* const kernel = kernels::cuda::load_kernels({"swap_kernel"}, 0)[0];
  for (void* const other : {stream, fake::stream(1, 1)}) {
    EXPECT_EQ(driver().record.status(event.get(), other), kInvalidHandle);
    EXPECT_EQ(driver().launch.status(kernel, 1, 1, 1, 32, 1, 1, 0, other, nullptr, nullptr), kInvalidHandle);
  }
  EXPECT_EQ(copy(stream), kInvalidHandle);
  EXPECT_EQ(driver().synchronize.status(stream), kInvalidHandle);
  EXPECT_EQ(driver().is_capturing.status(stream, &captured), kInvalidHandle);
}

TEST_F(FakeDevice, SharedMemoryBeginsPoisonedInEachBlock) {
  for (int i = 0; i < 2; ++i)
    fake::run_block(1, 1, 0, [] { EXPECT_EQ(fake::touch_shared_memory(), static_cast<char>(0xa5)); });
}

/// An access of a warp, 16 bytes a lane, is a range without holes: the device moves whole sectors.
TEST(WideAccesses, AreRangesWithoutHoles) {
  const auto expect_ranges = []<class S>(S) {
    using Wide = kernels::cuda::Access<S, true>;
    constexpr int kPiece = 16 / sizeof(S);
    for (int lane = 0; lane < kernels::cuda::kLanes; ++lane) {
      for (int j = 0; j < kernels::cuda::kPerLane; ++j)
        EXPECT_EQ(Wide(lane).element(j), Wide(0).element(j / kPiece * kPiece) + lane * kPiece + j % kPiece);
    }
  };
  expect_ranges(uint16_t{});
  expect_ranges(float{});
  expect_ranges(double{});
}

/// While a stream of this thread or another one is captured, by the capture's mode.
class FakeCapture : public FakeDevice {
 protected:
  using Outcome = std::pair<int, int>;  // what a call says, and what the end of the capture says

  Outcome outcome(int mode, bool elsewhere, const std::function<int()>& call) {
    start(std::nullopt);
    int status = 0;
    const auto with_context = [&] {
      const Current current(0);
      status = call();
    };
    const Recording recording({{0, stream(1)}}, mode,
                              [&] { elsewhere ? std::thread(with_context).join() : with_context(); });
    return {status, recording.status};
  }
};

TEST_F(FakeCapture, IsLostByWhatNoGraphRepeats) {
  const Outcome refused{kCaptureUnsupported, kCaptureInvalidated}, fine{0, 0};
  void *memory = nullptr, *module = nullptr;
  kernels::cuda::Event event(0);
  const std::vector<std::function<int()>> calls = {
      [&] { return driver().allocate.status(&memory, 16); },
      [&] { return driver().allocate_pinned.status(&memory, 16, 0); },
      [&] { return driver().synchronize.status(stream(2)); },
      [&] { return driver().wait.status(event.get()); },
      [&] { return driver().load_module.status(&module, ".version"); },
      [&] { return driver().free.status(number_); },
      [&] { return driver().free_pinned.status(pinned_); },
  };
  for (const auto& call : calls) {
    EXPECT_EQ(outcome(kThreadLocal, false, call), refused);
    EXPECT_EQ(outcome(kThreadLocal, true, call), fine);
    EXPECT_EQ(outcome(kRelaxed, false, call), fine);
    for (const bool elsewhere : {false, true}) {
      EXPECT_EQ(outcome(kGlobal, elsewhere, call), refused);
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
  kernels::cuda::Event event(0);
  const std::vector<std::pair<std::function<int()>, int>> rows = {
      {[&] { return driver().synchronize.status(stream(1)); }, kCaptureUnsupported},
      {[&] { return driver().synchronize_context.status(); }, kCaptureUnsupported},
      {[&] {
         event.record(stream(1));
         return driver().wait.status(event.get());
       },
       kCapturedEvent},
      {[&] {
         event.record(stream(2));
         return driver().wait_for_event.status(stream(1), event.get(), 0);
       },
       kCaptureIsolation},
  };
  for (const auto& [call, status] : rows) {
    for (const int mode : {kGlobal, kRelaxed})
      EXPECT_EQ(outcome(mode, false, call), Outcome(status, kCaptureInvalidated));
  }
  void* blocking = nullptr;
  driver().create_stream(&blocking, 0);
  const Recording recording({{0, blocking}}, kRelaxed, [&] { EXPECT_EQ(copy(nullptr), kCaptureImplicit); });
  EXPECT_EQ(recording.status, kCaptureInvalidated);
}

TEST_F(FakeCapture, AGraphOfFreedMemoryIsNotReplayed) {
  start(std::nullopt);
  const std::map<int, void*> streams{{0, stream(1)}};
  const Recording recording(streams, kGlobal, [&] { ASSERT_EQ(copy(stream(1)), 0); });
  EXPECT_EQ(recording.launch(streams), 0);
  kernels::cuda::release(number_, 0);
  EXPECT_EQ(recording.launch(streams), kIllegalAddress);
}

using FakeDeviceDeathTest = FakeDevice;

TEST_F(FakeDeviceDeathTest, WhatWouldGoWrongOnADeviceAborts) {
  start(std::nullopt);
  const auto* const misaligned = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(number_) + 4);
  const auto write_behind_the_end = [&] {
    fake::enqueue(0, stream(1), [to = reinterpret_cast<volatile char*>(number_)] { to[4] = 0; });
    kernels::cuda::release(number_, 0);
  };
  const auto write_what_was_freed = [&] {
    kernels::cuda::release(number_, 0);
    *static_cast<volatile int*>(number_) = 1;
  };
  const std::vector<std::pair<std::function<void()>, const char*>> rows = {
      {[&] { std::thread([&] { static_cast<void>(copy(stream(1))); }).join(); }, "without a current context"},
      {[&] { fake::run_block(1, 64, 0, [&] { static_cast<void>(__ldcg(misaligned)); }); }, "a misaligned address"},
      {[] { fake::run_block(1, 64, 0, [] { threadIdx.x % 2 == 0 ? __syncwarp() : void(); }); },
       "a lane has ended that others wait for"},
      {write_behind_the_end, "behind the end of 4 bytes|use-after-poison"},
      {write_what_was_freed, ""},
  };
  for (const auto& [dies, message] : rows) EXPECT_DEATH(dies(), message);
}

TEST_F(FakeDeviceDeathTest, MemoryOfADeviceIsOutOfTheHostsReachAndIsFreedWhenNothingUsesIt) {
  start(1, true);
  EXPECT_DEATH(*static_cast<volatile int*>(number_) = 1, "");
  for (int i = 0; i < 20; ++i) ASSERT_EQ(copy(stream(1)), 0);
  EXPECT_DEATH(kernels::cuda::release(number_, 0), "work under way was given");
  driver().synchronize(stream(1));
  kernels::cuda::release(number_, 0);
}

}  // namespace
}  // namespace shardow
