// The fake device itself: what is late, what waits for what, and what it refuses.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "fake_runtime.h"

namespace shardow {
namespace {

cudaStream_t stream(int number) {
  return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(0x1000 + number));
}

/// A number in device memory, which streams write.
class FakeDevice : public ::testing::Test {
 protected:
  static constexpr int kSeeds = 50;

  void start(uint64_t seed, bool guard = false) {
    fake::reset({.num_devices = 2, .seed = seed, .guard = guard});
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&there_), 4), cudaSuccess);
    ASSERT_EQ(cudaHostAlloc(reinterpret_cast<void**>(&pinned_), 4, 0), cudaSuccess);
    ASSERT_EQ(cudaMemset(there_, 0, 4), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    *pinned_ = -1;
  }
  void write(int value, cudaStream_t on) {
    fake::enqueue(0, on, [value, to = there_] { *to = value; });
  }

  int* there_ = nullptr;
  int* pinned_ = nullptr;
};

TEST_F(FakeDevice, IsLateUntilTheHostWaits) {
  int late = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    start(static_cast<uint64_t>(seed));
    write(7, stream(1));
    ASSERT_EQ(cudaMemcpyAsync(pinned_, there_, 4, cudaMemcpyDeviceToHost, stream(1)), cudaSuccess);
    late += *pinned_ == -1 ? 1 : 0;
    ASSERT_EQ(cudaStreamSynchronize(stream(1)), cudaSuccess);
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
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(pinned_, there_, 4, cudaMemcpyDeviceToHost), cudaSuccess);
    after += *pinned_ == 2 ? 1 : 0;
  }
  EXPECT_GT(after, kSeeds / 2);
  EXPECT_LT(after, 4 * kSeeds - kSeeds / 2);
}

TEST_F(FakeDevice, AStreamWaitsForAnEvent) {
  cudaEvent_t event;
  for (int seed = 0; seed < 4 * kSeeds; ++seed) {
    start(static_cast<uint64_t>(seed));
    ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    write(1, stream(1));
    ASSERT_EQ(cudaEventRecord(event, stream(1)), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(stream(2), event, 0), cudaSuccess);
    write(2, stream(2));
    ASSERT_EQ(cudaStreamSynchronize(stream(2)), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(pinned_, there_, 4, cudaMemcpyDeviceToHost), cudaSuccess);
    ASSERT_EQ(*pinned_, 2) << seed;
    ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  }
}

TEST_F(FakeDevice, RunsOneStreamAndWhatThatWaitsFor) {
  start(1);
  write(1, stream(1));
  write(2, stream(2));
  fake::run(0, stream(2));
  EXPECT_EQ(*there_, 2);
  EXPECT_EQ(fake::pending(), 1u);
  fake::synchronize();
  EXPECT_EQ(*there_, 1);
}

TEST_F(FakeDevice, CopiesFromMemoryThatIsNotPinnedAtOnce) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    start(static_cast<uint64_t>(seed));
    int value = 3;
    ASSERT_EQ(cudaMemcpyAsync(there_, &value, 4, cudaMemcpyHostToDevice, stream(1)), cudaSuccess);
    value = 4;
    int back = 0;
    ASSERT_EQ(cudaMemcpyAsync(&back, there_, 4, cudaMemcpyDeviceToHost, stream(1)), cudaSuccess);
    ASSERT_EQ(back, 3);
  }
}

TEST_F(FakeDevice, RefusesCopiesAndFailsForGoodWhenTold) {
  start(1);
  fake::fail_copy(1, 2);
  const auto copy = [&] { return cudaMemcpyAsync(pinned_, there_, 4, cudaMemcpyDeviceToHost, stream(1)); };
  EXPECT_EQ(copy(), cudaSuccess);
  EXPECT_EQ(copy(), cudaErrorInvalidValue);
  EXPECT_EQ(copy(), cudaErrorInvalidValue);
  EXPECT_EQ(copy(), cudaSuccess);
  fake::break_after(1);
  static_cast<void>(copy());
  EXPECT_EQ(cudaStreamSynchronize(stream(1)), cudaErrorIllegalAddress);
  EXPECT_EQ(copy(), cudaErrorIllegalAddress);
}

using FakeDeviceDeathTest = FakeDevice;

TEST_F(FakeDeviceDeathTest, MemoryOfADeviceIsOutOfTheHostsReach) {
  start(1, true);
  EXPECT_DEATH(*there_ = 1, "");
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), Parameters... arguments) {
  cudaLaunchConfig_t config;
  config.gridDim = dim3(1);
  config.blockDim = dim3(64);
  ASSERT_EQ(cudaLaunchKernelEx(&config, kernel, arguments...), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

void lanes_that_part(int) {
  if (threadIdx.x % 2 == 0) __syncwarp();
}

void misaligned(char* at) {
  static_cast<void>(__ldcs(reinterpret_cast<const uint4*>(at + 4)));
}

TEST_F(FakeDeviceDeathTest, KernelsThatWouldGoWrongAreNotRun) {
  start(1);
  EXPECT_DEATH(launch(&lanes_that_part, 1), "a lane has ended that others wait for");
  EXPECT_DEATH(launch(&misaligned, reinterpret_cast<char*>(there_)), "a misaligned address");
}

}  // namespace
}  // namespace shardow
