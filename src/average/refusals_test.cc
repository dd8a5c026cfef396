// Wrong use is a typed error with the numbers and the way out, before anything changes.
#include <functional>
#include <limits>

#include "average/average_fixture.h"
#include "kernels/cuda.h"
#include "shardow/average.h"

namespace shardow {
namespace {

TEST(Average, RefusesFactorsAndSamplesThatAreNoNumbers) {
  Owned p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  const std::vector<float> start = p.values;
  p.fill(2);
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const Factors factors : {Factors{nan, 0.1}, Factors{0.9, nan}, Factors{infinity, -infinity}}) {
    EXPECT_NE(message_of([&] { ema.update_by({&factors, 1}); }, Code::kInvalidArgument).find("average 0"), std::string::npos);
  }
  for (const double samples : {nan, infinity, -1.0}) message_of([&] { ema.update(std::nullopt, samples); }, Code::kInvalidArgument);
  EXPECT_EQ(copy_of(ema.views()[0]), start);
  EXPECT_EQ(ema.stats().step, 0);
}

TEST(Average, WrongUseIsAClearErrorBeforeAnythingChanges) {
  Owned p("p", {kRows}, 1), other("other", {kRows}, 1), shorter("p", {kRows - 1}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  const std::vector<float> start = copy_of(ema.views()[0]);
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
  };
  for (const auto& [call, says] : cases) EXPECT_NE(message_of(call, Code::kInvalidArgument).find(says), std::string::npos) << says;
  EXPECT_EQ(copy_of(ema.views()[0]), start);
  EXPECT_EQ(ema.stats().step, 0);
}

TEST(Average, CudaViewsAreRefusedWhereNoDeviceAnswers) {
  if (kernels::cuda::available()) GTEST_SKIP() << "a CUDA device is here: cuda_test covers it";
  const TensorView view{"p", DType::kF32, Region::whole({4}), nullptr, {Device::Kind::kCuda, 0, nullptr}};
  std::vector<float> memory(4);
  TensorView somewhere = view;
  somewhere.data = memory.data();  // never read: the device is asked first
  message_of([&] { Average(std::vector{somewhere}); }, Code::kUnsupported);
}

}  // namespace
}  // namespace shardow
