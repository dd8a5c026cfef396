// Averages on the host and the streams of their weights: who comes behind whom, and who waits.
#include <gtest/gtest.h>

#include <latch>

#include "offload_fixture.h"

namespace shardow {
namespace {

TEST(OffloadStreams, FollowsTheStream) {
  fake::reset({.seed = 11});
  Twins twins(model(DType::kF32), options_of(1, 4096));
  for (int i = 2; i < 12; ++i) {
    twins.step();
    twins.update();
    twins.use_stream(0, stream_of(0, i % 3));
    twins.step();
    twins.expect_equal("stream " + std::to_string(i % 3));
  }
}

TEST(OffloadStreams, AnotherStreamComesBehindTheLastOne) {
  fake::reset(1);
  Twins twins(model(DType::kF32), options_of(1, 4096));
  fake::clear();
  twins.use_stream(0, stream_of(0, 7));
  ASSERT_EQ(fake::calls_of("record").size(), 1U);
  EXPECT_EQ(fake::calls_of("record")[0].stream, stream_of(0));
  ASSERT_EQ(fake::calls_of("stream waits").size(), 1U);
  EXPECT_EQ(fake::calls_of("stream waits")[0].stream, stream_of(0, 7));
  fake::clear();
  twins.use_stream(0, stream_of(0, 7));
  EXPECT_TRUE(fake::calls().empty());
}

TEST(OffloadStreams, TheStreamWaitsForTheLastCopyAndTheHostDoesNot) {
  fake::reset({.threads = true});
  Twins twins(model(DType::kF32), options_of(1, 1 << 20));
  twins.step();
  std::latch held(1);
  fake::enqueue(0, stream_of(0), [&] { held.wait(); });
  fake::clear();
  twins.offloaded->update();
  twins.offloaded->finish_reading();  // nothing has been copied yet
  EXPECT_GT(fake::pending(), 0U);
  EXPECT_EQ(fake::calls_of("stream waits").back().stream, stream_of(0));
  twins.resident->update();
  twins.step();
  held.count_down();
  twins.expect_equal();
}

/// For the thread sanitizer: a copy, the averaging and the optimizer's step are on three threads, and each finds the
/// others' work done.
TEST(OffloadStreams, OnThreadsThatMeet) {
  for (const int64_t ring_bytes : kRings) {
    fake::reset({.num_devices = 2, .threads = true});
    AverageOptions options = options_of(2, ring_bytes);
    options.num_threads = 2;
    std::vector<Spec> specs = model(DType::kBF16, 2);
    specs.push_back({"large", DType::kF32, Region::whole({(1 << 20) + 7}), 0});
    Twins twins(specs, options);
    const int rounds = ring_bytes < (1 << 20) ? 2 : 4;
    for (int i = 0; i < rounds; ++i) {
      twins.step();
      twins.update();
      twins.step();
      twins.update();
      if (i % 2 == 1) twins.move();
      twins.expect_equal_through_a_swap(1);
    }
  }
}

TEST(OffloadStreams, WithoutFinishReadingTheAveragesWouldTear) {
  int torn = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    fake::reset({.seed = seed, .log = false});
    Twins twins(model(DType::kF32), options_of(1, 4096));
    twins.step();
    twins.update();
    twins.step_anew();
    twins.offloaded->wait();
    torn += twins.equal() ? 0 : 1;
  }
  EXPECT_GT(torn, 0);
}

TEST(OffloadStreams, IsNotCaptured) {
  fake::reset(fake::Options{});
  Twins twins(model(DType::kF32), options_of(1, 4096));
  twins.step();
  twins.update();
  fake::capture(stream_of(0), true);
  EXPECT_NE(error_of([&] { twins.offloaded->update(); }).find("update() while its stream is captured"),
            std::string::npos);
  twins.offloaded->finish_reading();
  fake::capture(stream_of(0), false);
  EXPECT_NE(error_of([&] { twins.offloaded->prepare_replay(); }).find("call update() after each replay"),
            std::string::npos);
  twins.expect_equal();
}

}  // namespace
}  // namespace shardow
