// What becomes of averages on the host where copies are refused, or the device fails for good.
#include <gtest/gtest.h>

#include <latch>

#include "offload_fixture.h"

namespace shardow {
namespace {

/// `fn` until it goes through; how often it did not.
template <typename Fn>
int until_through(Fn&& fn) {
  int failures = 0;
  for (; failures < 1000; ++failures) {
    if (error_of(fn).empty()) return failures;
  }
  ADD_FAILURE() << "never got through";
  return failures;
}

struct Refusals {
  int number, times;  // of copies
};

/// A refusal of each copy of what follows, of one or a few.
std::vector<Refusals> refusals(int copies) {
  std::vector<Refusals> found;
  for (int number = 0; number < copies; ++number) {
    for (const int times : {1, 2, 9}) found.push_back({number, times});
  }
  return found;
}

TEST(OffloadFailures, AnUpdateWhoseWeightsFitTheRingIsMadeWholeOrNotAtAll) {
  int failed = 0;
  for (const auto& [number, times] : refusals(20)) {
    fake::reset({.num_devices = 2, .seed = static_cast<uint64_t>(number), .log = false});
    Twins twins(model(DType::kF32, 2), options_of(2, 1 << 20));
    twins.step();
    twins.update();
    twins.step();
    fake::fail_copy(number, times);
    twins.offloaded->update(2);
    const std::string said = error_of([&] { twins.offloaded->finish_reading(); });
    const std::string then = said.empty() ? error_of([&] { twins.offloaded->wait(); }) : said;
    if (then.empty()) {
      twins.resident->update(2);
    } else {
      ++failed;
      EXPECT_NE(then.find("the update of step 2 was not made, since weights did not reach the host; the averages are "
                          "those of step 1"),
                then.npos)
          << then;
    }
    fake::fail_copy(0, 0);
    twins.expect_equal("refused copy " + std::to_string(number));
    EXPECT_EQ(twins.offloaded->stats().updates, twins.resident->stats().updates);
    twins.step();
    twins.offloaded->update(3);
    twins.resident->update(3);
    twins.expect_equal("after refused copy " + std::to_string(number));
    EXPECT_EQ(twins.offloaded->state(), twins.resident->state());
  }
  EXPECT_EQ(failed, 3 * 7) << "each of the copies, but of what is empty";
}

TEST(OffloadFailures, ADeviceThatFailsForGoodLeavesTheAveragesOfTheLastUpdate) {
  int failed = 0;
  for (int operations = 0; operations < 30; ++operations) {
    fake::reset({.num_devices = 2, .seed = static_cast<uint64_t>(operations), .log = false});
    Twins twins(model(DType::kF32, 2), options_of(1, 1 << 20));
    twins.step();
    twins.update();
    twins.step();
    fake::synchronize();
    twins.offloaded->wait();
    fake::break_after(operations);
    std::string said = error_of([&] { twins.offloaded->update(); });
    if (said.empty()) said = error_of([&] { twins.offloaded->wait(); });
    if (said.empty()) {
      twins.resident->update();
    } else {
      ++failed;
    }
    EXPECT_TRUE(twins.equal()) << said;
    fake::break_after(-1);
  }
  EXPECT_GE(failed, 5);
}

TEST(OffloadFailures, AnUpdateThatStoppedHalfwayIsTakenUpByTheNextCall) {
  int stopped = 0, not_made = 0;
  for (const auto& [number, times] : refusals(24)) {
    fake::reset({.num_devices = 2, .seed = static_cast<uint64_t>(number), .log = false});
    Twins twins(model(DType::kF64, 2), options_of(2, 4096));
    twins.step();
    fake::fail_copy(number, times);
    twins.offloaded->update(1);
    const std::string said = error_of([&] { twins.offloaded->wait(); });
    if (!said.empty()) {
      EXPECT_EQ(fake::pending(), 0U) << "nothing reads the weights any more";
    }
    if (said.find("was not made") != said.npos) {
      ++not_made;
    } else {
      if (!said.empty()) {
        ++stopped;
        EXPECT_NE(said.find("the update of step 1 stopped after"), said.npos) << said;
        fake::fail_copy(0, 4);
        EXPECT_NE(error_of([&] { static_cast<void>(twins.offloaded->views()); }), "");
        EXPECT_NE(error_of([&] { twins.offloaded->finish_reading(); }), "") << "weights may not change";
        EXPECT_NE(error_of([&] { twins.offloaded->update(2); }), "");
        EXPECT_NE(error_of([&] { twins.offloaded->swap_in(); }), "");
      }
      until_through([&] { twins.offloaded->finish_reading(); });
      twins.resident->update(1);
    }
    fake::fail_copy(0, 0);
    twins.expect_equal("refused copy " + std::to_string(number));
    twins.step();
    twins.offloaded->update(2);
    twins.resident->update(2);
    twins.expect_equal("after refused copy " + std::to_string(number));
  }
  EXPECT_GE(stopped, 10);
  EXPECT_GE(not_made, 10);
}

/// Some weights are on the host and averaged already, the others have not come when finish_reading() lets them change,
/// and never do.
TEST(OffloadFailures, TornAveragesAreRefusedUntilTheyBeginAgain) {
  fake::reset({.threads = true});
  Twins twins(model(DType::kF32), options_of(1, 1 << 20), 1, {.on_host = {0}, .beside = {}});
  twins.step();
  std::latch held(1);
  fake::enqueue(0, stream_of(0), [&] { held.wait(); });
  twins.offloaded->update();
  twins.offloaded->finish_reading();
  fake::break_after(1);
  held.count_down();
  const std::string said = error_of([&] { twins.offloaded->wait(); });
  EXPECT_NE(said.find("the update of step 1 stopped after 0 of 1 blocks, and the weights may have changed since"),
            said.npos)
      << said;
  EXPECT_EQ(error_of([&] { static_cast<void>(twins.offloaded->views()); }), said);
  EXPECT_EQ(error_of([&] { twins.offloaded->update(); }), said);
  EXPECT_EQ(error_of([&] { twins.offloaded->swap_in(); }), said);
  EXPECT_EQ(error_of([&] { twins.offloaded->finish_reading(); }), said);
  EXPECT_NE(error_of([&] { twins.offloaded->reset(); }).find("reset() failed"), said.npos);
  EXPECT_NE(error_of([&] { twins.offloaded->wait(); }).find("the averages are of no step"), said.npos);
  fake::break_after(-1);
  twins.step_anew();
  twins.offloaded->reset();
  twins.resident->reset();
  twins.expect_equal("after reset()");
}

TEST(OffloadFailures, ASwapThatFailsLosesNothing) {
  int failed_in = 0, failed_out = 0, partly = 0;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [number, times] : refusals(40)) {
      fake::reset({.num_devices = 2, .seed = static_cast<uint64_t>(number), .log = false});
      Twins twins(model(dtype, 2), options_of(1, 4096));
      twins.step();
      twins.update();
      twins.expect_equal();
      fake::fail_copy(number, times);
      if (!error_of([&] { twins.offloaded->swap_in(); }).empty()) {
        ++failed_in;
        partly += twins.offloaded->swapped() ? 1 : 0;
        until_through([&] { twins.offloaded->swap_out(); });
        fake::fail_copy(0, 0);
        twins.expect_equal("failed on the way in at copy " + std::to_string(number));
        twins.offloaded->swap_in();
      }
      twins.resident->swap_in();
      fake::fail_copy(0, 0);
      twins.expect_equal_weights("swapped in");
      fake::fail_copy(number, times);
      failed_out += until_through([&] { twins.offloaded->swap_out(); });
      EXPECT_FALSE(twins.offloaded->swapped());
      twins.resident->swap_out();
      fake::fail_copy(0, 0);
      twins.expect_equal("failed on the way out at copy " + std::to_string(number));
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GE(failed_in, 50);
  EXPECT_GE(failed_out, 50);
  EXPECT_GE(partly, 10);
}

TEST(OffloadFailures, EndsWhateverIsUnderWay) {
  for (int number = -1; number < 12; ++number) {
    fake::reset({.seed = 1, .log = false});
    const size_t before = fake::allocated();
    {
      Twins twins(model(DType::kF64), options_of(1, 4096));
      twins.step();
      if (number >= 0) fake::fail_copy(number, -1);
      twins.offloaded->update();
      if (number % 2 == 0) static_cast<void>(error_of([&] { twins.offloaded->wait(); }));
    }
    EXPECT_EQ(fake::allocated(), before);
  }
}

}  // namespace
}  // namespace shardow
