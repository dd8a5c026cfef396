// Wrong use is a typed error with the numbers and a remedy, before anything changes.
#include <functional>
#include <limits>

#include "average/average_fixture.h"
#include "kernels/cuda.h"
#include "shardow/average.h"

namespace shardow {
namespace {

TEST(Average, RefusesFactorsAndSamplesThatAreNoNumbers) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  const std::vector<float> start = p.values;
  p.fill(2);
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const Factors factors : {Factors{nan, 0.1}, Factors{0.9, nan}, Factors{infinity, -infinity}}) {
    EXPECT_NE(message_of(
                  [&] {
                    ema.update_by({&factors, 1});
                  },
                  Code::kInvalidArgument)
                  .find("average 0"),
              std::string::npos);
  }
  for (const double samples : {nan, infinity, -1.0})
    message_of([&] { ema.update(std::nullopt, samples); }, Code::kInvalidArgument);
  EXPECT_EQ(copy_of(ema.views()[0]), start);
  EXPECT_EQ(ema.stats().step, 0);
}

TEST(Average, WrongUseIsAClearErrorBeforeAnythingChanges) {
  OwnTensor p("p", {kRows}, 1), other("other", {kRows}, 1), shorter("p", {kRows - 1}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  const std::vector<float> start = copy_of(ema.views()[0]);
  const auto in = [](const TensorView& average) { return std::vector<std::vector<TensorView>>{{average}}; };
  TensorView narrow = p.view;
  narrow.dtype = DType::kBF16;
  const struct {
    std::function<void()> call;
    const char* says;
  } cases[] = {
      {[&] { ema.update(std::vector{other.view}); }, "'other'"},
      {[&] { ema.update(std::vector{shorter.view}); }, "region"},
      {[&] { ema.update(std::vector{narrow}); }, "BF16"},
      {[&] { ema.update(std::vector<TensorView>{}); }, "0 parameters"},
      {[&] { ema.update(0); }, "step 0"},
      {[&] { ema.update(std::numeric_limits<int64_t>::max()); }, "below 2^62"},
      {[&] { ema.swap_in(1); }, "1 averages"},
      {[&] {
         Average(std::vector{p.view, p.view});
       },
       "two parameters"},
      {[&] { Average(std::vector{p.view}, {.schedules = {}}); }, "0 schedules"},
      {[&] { Average(std::vector{p.view}, {.update_every = 0}); }, "update_every"},
      {[&] { Average(std::vector{p.view}, {.dtype = DType::kBF16, .rounding = Rounding::kNearest}); }, "BF16"},
      {[&] { Average(std::vector{p.view}, {.rule = Rule::kMulAdd, .rounding = Rounding::kStochastic}); }, "lerp"},
      {[&] { Average(std::vector{p.view}, {.dtype = DType::kI32}); }, "I32"},
      {[&] { Average(std::vector{p.view}, in(shorter.view)); }, "average 'p' has region [36], this rank averages [37]"},
      {[&] { Average(std::vector{p.view}, in(other.view)); }, "average 'other' stands where 'p' belongs"},
      {[&] { Average(std::vector{p.view}, in(narrow)); }, "average 'p' is BF16, options.dtype is F32"},
      {[&] { Average(std::vector{p.view}, std::vector<std::vector<TensorView>>{}); }, "0 averages for 1 schedules"},
      {[&] { ema.swap_in(std::vector{shorter.view}); }, "'p' has region [36]; it was [37]"},
      {[&] { ema.swap_in(std::vector{other.view}); }, "'other'"},
  };
  for (const auto& [call, says] : cases)
    EXPECT_NE(message_of(call, Code::kInvalidArgument).find(says), std::string::npos) << says;
  EXPECT_EQ(copy_of(ema.views()[0]), start);
  EXPECT_EQ(ema.stats().step, 0);
}

/// The table of average_options.h.
TEST(Average, TakesTheRoundingsOfTheTableAndNoOthers) {
  OwnTensor p("p", {kRows}, 1);
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    for (const Rule rule :
         {Rule::kLerp, Rule::kMulAdd, Rule::kTwoProducts, Rule::kDifference, Rule::kFusedDifference, Rule::kQuotient}) {
      for (const Rounding rounding : {Rounding::kAuto, Rounding::kNearest, Rounding::kStochastic}) {
        const bool narrow = dtype == DType::kBF16 || dtype == DType::kF16, lerp = rule == Rule::kLerp;
        const bool taken = rounding == Rounding::kStochastic ? lerp && dtype != DType::kF64
                           : narrow                          ? lerp && rounding == Rounding::kAuto
                                                             : true;
        const auto make = [&] {
          Average(std::vector{p.view}, {.dtype = dtype, .rule = rule, .rounding = rounding}).update();
        };
        if (taken) {
          EXPECT_NO_THROW(make());
        } else {
          message_of(make, Code::kInvalidArgument);
        }
      }
    }
  }
}

TEST(Average, ReplicasOnADeviceAreRefusedByNameBeforeTheDeviceIsAsked) {
  std::vector<float> memory(4);
  const TensorView view{"on.device", DType::kF32, Region::whole({4}), memory.data(), {Device::Kind::kCuda, 0, nullptr}};
  const auto group = solo();
  const std::string message =
      message_of([&] { Average(std::vector{view}, {.replicas = group.get()}); }, Code::kUnsupported);
  EXPECT_NE(message.find("'on.device' is on CUDA device 0: AverageOptions.replicas moves host memory alone; divide"),
            std::string::npos)
      << message;
}

TEST(Average, CudaViewsAreRefusedWhereNoDeviceAnswers) {
  if (kernels::cuda::available()) GTEST_SKIP() << "a CUDA device is here: cuda_test covers it";
  const TensorView view{"p", DType::kF32, Region::whole({4}), nullptr, {Device::Kind::kCuda, 0, nullptr}};
  std::vector<float> memory(4);
  TensorView somewhere = view;
  somewhere.data = memory.data();  // never read: the check for a device comes first
  message_of([&] { Average(std::vector{somewhere}); }, Code::kUnsupported);
}

}  // namespace
}  // namespace shardow
