// Overlapped updates and updates that are waited for give the same averages, whatever is called in between.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <latch>
#include <limits>
#include <random>
#include <thread>

#include "average/average_fixture.h"
#include "base/worker.h"

namespace shardow {
namespace {

/// Two tensors and their averages, in place and elsewhere.
struct Training {
  OwnTensor first, second, moved;
  Average average;

  explicit Training(AverageOptions options)
      : first("first", {kRows, kColumns}, 1),
        second("second", columns(), 2),
        moved("first", {kRows, kColumns}, 3),
        average(views(), std::move(options)) {}

  std::vector<TensorView> views() const { return {first.view, second.view}; }

  /// Waits for the averages, then changes the weights as an optimizer does.
  void step(uint32_t seed) {
    average.wait();
    first.fill(seed);
    second.fill(seed + 1);
  }

  void move() {
    average.wait();
    moved.values = first.values;
    std::swap(first, moved);
    average.bind(views());
  }

  std::vector<std::vector<float>> everything() {
    std::vector<std::vector<float>> values = {first.values, second.values};
    for (size_t k = 0; k < average.size(); ++k) {
      for (const TensorView& view : average.views(k)) values.push_back(copy_of(view));
    }
    return values;
  }
};

AverageOptions options_of(std::mt19937& random) {
  AverageOptions options;
  options.schedules = {Schedule::constant(0.9)};
  if (random() % 2 == 0) options.schedules.push_back(Schedule::constant(0.99));
  if (random() % 2 == 0) options.rounding = Rounding::kStochastic;
  options.update_every = 1 + random() % 2;
  options.start_step = random() % 3;
  options.num_threads = static_cast<int>(random() % 3);
  return options;
}

/// Makes the call that `what` selects.
void call(Training& training, uint32_t what, uint32_t seed) {
  Average& average = training.average;
  switch (what % 9) {
    case 0: average.reset(); break;
    case 1: training.move(); break;
    case 2: average.set_state(average.state()); break;
    case 3:
      average.swap_in(seed % average.size());
      average.swap_out();
      break;
    case 4: EXPECT_EQ(average.stats().parameters, 2); break;
    default: training.step(seed); average.update();
  }
}

TEST(Overlap, GivesWhatUpdatesGiveThatAreWaitedFor) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    AverageOptions options = options_of(random);
    Training waiting(options);
    options.overlap = true;
    Training overlapped(options);
    for (int i = 0; i < 12; ++i) {
      const auto what = static_cast<uint32_t>(random()), values = static_cast<uint32_t>(random());
      call(waiting, what, values);
      call(overlapped, what, values);
    }
    ASSERT_EQ(waiting.everything(), overlapped.everything()) << "seed " << seed;
    ASSERT_EQ(waiting.average.state(), overlapped.average.state()) << "seed " << seed;
  }
}

/// Holds work in the background until let_go().
class Held {
 public:
  Held() {
    base::worker_seam = [this] { latch_.wait(); };
  }
  ~Held() {
    let_go();
    base::worker_seam = nullptr;
  }
  void let_go() {
    if (!std::exchange(gone_, true)) latch_.count_down();
  }

 private:
  std::latch latch_{1};
  bool gone_ = false;
};

AverageOptions overlapped(double decay) {
  AverageOptions options = with_decay(decay);
  options.overlap = true;
  return options;
}

TEST(Overlap, ReturnsBeforeTheWorkIsDone) {
  Training training(overlapped(0.5));
  const std::vector<float> before = training.first.values;
  training.step(7);
  std::vector<float> expected = before;
  lerp(expected, training.first.values, 0.5);
  const TensorView view = training.average.views()[0];
  Held held;
  EXPECT_TRUE(training.average.update().applied);
  EXPECT_EQ(copy_of(view), before);
  held.let_go();
  training.average.wait();
  EXPECT_EQ(copy_of(view), expected);
}

TEST(Overlap, EverythingThatReadsAveragesWaits) {
  const std::vector<void (*)(Average&)> reads = {
      [](Average& average) { average.views(); },
      [](Average& average) { average.stats(); },
      [](Average& average) { average.state(); },
      [](Average& average) { average.non_finite(); },
      [](Average& average) { average.reset(); },
      [](Average& average) { average.set_state(average.state()); },
      [](Average& average) { average.update(); },
      [](Average& average) { average.swap_in(); },
      [](Average& average) { Average(std::move(average)).wait(); },
  };
  for (size_t i = 0; i < reads.size(); ++i) {
    std::atomic<bool> over = false;
    Held held;  // gone after what it holds up
    Training training(overlapped(0.5));
    training.average.update();
    std::thread lets_go([&] {
      EXPECT_FALSE(over) << "read " << i;
      held.let_go();
    });
    reads[i](training.average);
    over = true;
    lets_go.join();
  }
}

TEST(Overlap, TellsWhatIsNotFiniteAtTheNextCallAndLosesNoUpdate) {
  AverageOptions options = overlapped(0.5);
  options.non_finite = NonFinite::kRaise;
  Training training(options);
  training.step(7);
  training.first.values[3] = std::numeric_limits<float>::quiet_NaN();
  training.average.update();
  const std::string message = message_of([&] { training.average.update(); }, Code::kInvalidArgument);
  EXPECT_NE(message.find("step 1: 1 elements of the parameters are NaN or Inf, the first in 'first'"),
            std::string::npos)
      << message;
  EXPECT_NE(message_of([&] { training.average.wait(); }, Code::kInvalidArgument).find("step 2"), std::string::npos);
  training.average.wait();
  EXPECT_EQ(training.average.stats().updates, 2);
  EXPECT_EQ(training.average.stats().held_non_finite, 2);
}

TEST(Overlap, ReportsWhatWasHeldWithTheNextUpdate) {
  Training training(overlapped(0.5));
  training.first.values[3] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(training.average.update().non_finite, 0);
  training.average.wait();
  EXPECT_EQ(training.average.update().non_finite, 1);
}

TEST(Overlap, CountsWhatWasHiddenAndWhatWasWaitedFor) {
  Training training(overlapped(0.5));
  for (int i = 0; i < 100; ++i) training.average.update();
  const AverageStats stats = training.average.stats();
  EXPECT_GT(stats.waited_seconds + stats.hidden_seconds, 0);
  EXPECT_GE(stats.hidden_seconds, 0);
  EXPECT_EQ(stats.updates, 100);
}

TEST(Overlap, EndsBeforeTheAverageIsGone) {
  for (int i = 0; i < 100; ++i) Training(overlapped(0.5)).average.update();
}

TEST(Overlap, AForkFindsWholeAveragesAndGoesOn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow threads started after fork()";
#endif
  Training training(overlapped(0.5)), waiting(with_decay(0.5));
  for (Training* twin : {&training, &waiting}) twin->step(7);
  waiting.average.update();
  training.average.update();
  const pid_t child = fork();
  if (child == 0) {
    const bool whole = training.everything() == waiting.everything();
    training.average.update();
    waiting.average.update();
    _exit(whole && training.everything() == waiting.everything() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(training.everything(), waiting.everything());
}

TEST(Overlap, IsRefusedForADevicesViews) {
  OwnTensor tensor("p", {4}, 1);
  tensor.view.device = {Device::Kind::kCuda, 0, nullptr};
  const std::string message = message_of([&] { Average({&tensor.view, 1}, overlapped(0.5)); }, Code::kUnsupported);
  EXPECT_NE(message.find("'p' is on a device"), std::string::npos) << message;
}

}  // namespace
}  // namespace shardow
