// What weights and averages are inside a swap and after it, bit for bit.
#include <bit>
#include <random>

#include "average/average_fixture.h"
#include "shardow/average.h"

namespace shardow {
namespace {

TEST(Swap, IsTheSameOnAnyThreads) {
  constexpr int64_t kCount = (1 << 20) + 37;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<std::vector<uint32_t>> inside;
    for (const int threads : {1, 3}) {
      std::vector<uint32_t> memory(kCount), before;
      std::mt19937 random(5);
      for (uint32_t& word : memory) word = random() & 0x3fff3fff;
      const TensorView view{"p", dtype, Region::whole({kCount}), memory.data()};
      AverageOptions options{.schedules = {Schedule::constant(0.9)}};
      options.num_threads = threads;
      Average ema(std::vector{view}, options);
      for (uint32_t& word : memory) word = random() & 0x3fff3fff;
      ema.update();
      before = memory;
      ema.swap_in();
      inside.push_back(memory);
      EXPECT_NE(memory, before);
      ema.swap_out();
      EXPECT_TRUE(memory == before) << threads;
    }
    EXPECT_TRUE(inside[0] == inside[1]);
  }
}

TEST(Average, SwapExchangesAndUndoesBitForBit) {
  OwnTensor p("p", {kRows}, 1), q("q", {0, 4}, 2);
  Average ema(std::vector{p.view, q.view}, with_decay(0.9));
  p.fill(2);
  ema.update();
  const std::vector<float> weights = p.values, average = copy_of(ema.views()[0]);
  ema.swap_in();
  EXPECT_TRUE(ema.swapped());
  EXPECT_EQ(p.values, average);
  ema.swap_out();
  EXPECT_FALSE(ema.swapped());
  EXPECT_EQ(p.values, weights);
  EXPECT_EQ(copy_of(ema.views()[0]), average);
}

TEST(Average, SwapOfOtherDtypesIsExactBothWays) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF64}) {
    std::vector<uint64_t> memory(64), before;
    std::mt19937_64 random(7);
    for (uint64_t& word : memory)
      word = dtype == DType::kF64 ? std::bit_cast<uint64_t>(static_cast<double>(random()) * 1e-19)
                                  : random() & 0x3fff3fff3fff3fffu;
    const Region region = Region::whole({64});
    const TensorView view{"p", dtype, region, memory.data()};
    Average ema(std::vector{view}, with_decay(0.5));
    for (uint64_t& word : memory)
      word = dtype == DType::kF64 ? std::bit_cast<uint64_t>(static_cast<double>(random()) * 1e-19)
                                  : random() & 0x3fff3fff3fff3fffu;
    ema.update();
    before = memory;
    const std::vector<float> average = copy_of(ema.views()[0]);
    ema.swap_in();
    EXPECT_NE(memory, before);
    ema.swap_out();
    EXPECT_EQ(memory, before);
    EXPECT_EQ(copy_of(ema.views()[0]), average);
  }
}

TEST(Average, IsNotUpdatedOrReadWhileSwapped) {
  OwnTensor p("p", {kRows}, 1);
  Average ema(std::vector{p.view}, with_decay(0.9));
  ema.swap_in();
  message_of([&] { ema.update(); }, Code::kInvalidArgument);
  message_of([&] { (void)ema.views(); }, Code::kInvalidArgument);
  message_of([&] { ema.reset(); }, Code::kInvalidArgument);
  message_of([&] { ema.set_state(ema.state()); }, Code::kInvalidArgument);
}

}  // namespace
}  // namespace shardow
