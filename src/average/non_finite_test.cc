// NaN and Inf in the parameters are held, counted, raised, and reported with the tensor's name.
#include <limits>
#include <memory>

#include "average/average_fixture.h"
#include "shardow/average.h"

namespace shardow {
namespace {

TEST(Average, HoldsNonFiniteElementsAndCountsThem) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  const std::vector<float> start = p.values;
  p.fill(2);
  p.values[3] = std::numeric_limits<float>::quiet_NaN();
  p.values[9] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(ema.update().non_finite, 2);
  const std::vector<float> average = copy_of(ema.views()[0]);
  EXPECT_EQ(average[3], start[3]);
  EXPECT_EQ(average[9], start[9]);
  EXPECT_NE(average[4], start[4]);
  EXPECT_EQ(ema.stats().held_non_finite, 2);
}

TEST(Average, RemembersTheFirstUpdateThatHeldAnything) {
  OwnTensor p("first", {kRows}, 1), q("second", {kRows}, 2);
  Average ema(std::vector{p.view, q.view}, with_decay(0.9));
  ema.update();
  EXPECT_FALSE(ema.non_finite());
  q.values[5] = q.values[6] = std::numeric_limits<float>::infinity();
  ema.update(4);
  p.values[0] = std::numeric_limits<float>::quiet_NaN();
  ema.update(5);
  ASSERT_TRUE(ema.non_finite());
  EXPECT_EQ(ema.non_finite()->step, 4);
  EXPECT_EQ(ema.non_finite()->elements, 2);
  EXPECT_EQ(ema.non_finite()->tensor, "second");
  ema.forget_non_finite();
  EXPECT_FALSE(ema.non_finite());
  ema.update(6);
  EXPECT_EQ(ema.non_finite()->tensor, "first");
  EXPECT_EQ(ema.stats().held_non_finite, 8);
}

TEST(Average, OfAStateThatIsTakenNothingIsRememberedFromBefore) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  const std::string state = ema.state();
  p.values[5] = std::numeric_limits<float>::infinity();
  ema.update();
  ASSERT_TRUE(ema.non_finite());
  ema.set_state(state);
  EXPECT_FALSE(ema.non_finite());
}

TEST(Average, RaisesForNonFiniteElementsNamingTheTensor) {
  OwnTensor p("first", {kRows}, 1), q("second", {kRows}, 2);
  AverageOptions options = with_decay(0.9);
  options.non_finite = NonFinite::kRaise;
  Average ema(std::vector{p.view, q.view}, options);
  q.values[0] = std::numeric_limits<float>::infinity();
  EXPECT_NE(message_of([&] { ema.update(); }, Code::kInvalidArgument).find("'second'"), std::string::npos);
}

TEST(Average, ThatRaisesHasMadeAndCountedTheUpdateThatHoldMakes) {
  OwnTensor p("first", {kRows}, 1), q("second", {kRows}, 2);
  AverageOptions options = with_decay(0.9);
  Average holds(std::vector{p.view, q.view}, options);
  options.non_finite = NonFinite::kRaise;
  Average raises(std::vector{p.view, q.view}, options);
  for (const bool bad : {true, false}) {
    p.fill(bad ? 3 : 4);
    q.fill(bad ? 5 : 6);
    if (bad) q.values[7] = std::numeric_limits<float>::quiet_NaN();
    holds.update();
    if (bad) {
      const std::string message = message_of([&] { raises.update(); }, Code::kInvalidArgument);
      EXPECT_NE(message.find("step 1: 1 elements of the parameters are NaN or Inf, the first in 'second'"),
                std::string::npos)
          << message;
      EXPECT_NE(message.find("which is counted: go on with the next step"), std::string::npos) << message;
      EXPECT_EQ(raises.non_finite()->tensor, "second");
    } else {
      raises.update();
    }
    for (const size_t i : {0u, 1u}) EXPECT_EQ(copy_of(raises.views()[i]), copy_of(holds.views()[i]));
    EXPECT_EQ(raises.state(), holds.state());
  }
  EXPECT_EQ(raises.stats().step, 2);
}

TEST(Average, TheFirstTensorWithANonFiniteElementIsTheSameOnAnyThreads) {
  std::vector<std::unique_ptr<OwnTensor>> tensors;
  std::vector<TensorView> views;
  for (uint32_t i = 0; i < 40; ++i) {
    tensors.push_back(std::make_unique<OwnTensor>("t" + std::to_string(i), Shape{1 << 16}, i));
    views.push_back(tensors.back()->view);
  }
  for (const size_t bad : {31, 39, 17}) {
    tensors[bad]->values[5] = std::numeric_limits<float>::infinity();
    for (const int threads : {1, 2, 4}) {
      AverageOptions options = with_decay(0.9);
      options.num_threads = threads;
      Average ema(views, options);
      ema.update();
      ASSERT_TRUE(ema.non_finite());
      EXPECT_EQ(ema.non_finite()->tensor, bad == 39 ? "t31" : "t" + std::to_string(bad)) << threads;
    }
  }
}

}  // namespace
}  // namespace shardow
