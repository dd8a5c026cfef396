// Weights and averages inside a swap and after it, bit for bit. Swaps are also stopped between any two of their steps:
// while they begin, while they end, and once more while they are undone.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>

#include "average/average_fixture.h"
#include "average/impl.h"
#include "average/ring_swap.h"
#include "shardow/average.h"
#include "shardow/error.h"

namespace shardow {
namespace {

struct Stopped : std::runtime_error {
  Stopped() : std::runtime_error("stopped") {}
};

thread_local int steps_left = -1;  // below 0: never stops
thread_local int stops_left = 0;   // how many steps in a row fail from there on

void stop() {
  if (steps_left < 0 || steps_left-- > 0) return;
  steps_left = --stops_left > 0 ? 0 : -1;
  throw Stopped();
}

/// Weights of three dtypes: exchanged in place as they are, packed in 48 bits, and kept aside.
class SwapStopped : public testing::Test {
 protected:
  SwapStopped() : SwapStopped(nullptr) {}
  explicit SwapStopped(Group* replicas) {
    fill(1);
    const AverageOptions options{.schedules = {Schedule::constant(0.5)}, .replicas = replicas};
    ema = std::make_unique<Average>(views(), options);
    fill(2);
    ema->update();
    weights = memory;
    averages = read();
    average::swap_seam = stop;
  }
  ~SwapStopped() override { average::swap_seam = nullptr; }

  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    for (uint32_t& word : memory) word = random() & 0x3fff3fff;  // two small halves, or one small float
  }

  std::vector<TensorView> views() {
    return {{"f32", DType::kF32, Region::whole({16}), memory.data()},
            {"bf16", DType::kBF16, Region::whole({32}), memory.data() + 16},
            {"f16", DType::kF16, Region::whole({32}), memory.data() + 32},
            {"empty", DType::kF32, Region::whole({0}), nullptr},
            {"last", DType::kF32, Region::whole({16}), memory.data() + 48}};
  }

  std::vector<uint32_t> read() const {
    std::vector<uint32_t> all;
    for (const TensorView& view : ema->views()) {
      const auto* data = static_cast<const uint32_t*>(view.data);
      all.insert(all.end(), data, data + view.region.size());
    }
    return all;
  }

  /// Returns whether the call succeeds, with `stops` failures in a row from step `at` on.
  bool run(int at, int stops, const std::function<void()>& call) {
    steps_left = at;
    stops_left = stops;
    bool through = true;
    try {
      call();
    } catch (const Stopped&) {
      through = false;
    }
    steps_left = -1;
    return through;
  }

  void expect_all_back(const std::string& where) {
    EXPECT_FALSE(ema->swapped()) << where;
    EXPECT_EQ(memory, weights) << where;
    EXPECT_EQ(read(), averages) << where;
  }

  std::vector<uint32_t> memory = std::vector<uint32_t>(64), weights, averages;
  std::unique_ptr<Average> ema;
};

TEST_F(SwapStopped, OnTheWayInTakesBackWhatWasExchanged) {
  int at = 0;
  for (; !run(at, 1, [&] { ema->swap_in(); }); ++at) expect_all_back("stopped at step " + std::to_string(at));
  EXPECT_GE(at, 6);  // one kept aside, one before each view, one after the last
  EXPECT_TRUE(ema->swapped());
  ema->swap_out();
  expect_all_back("at the end");
}

TEST_F(SwapStopped, OnTheWayInAndAgainWhileTakingBackKeepsARecordToGoOnFrom) {
  int failed_twice = 0;
  for (int at = 0; at < 8; ++at) {
    if (run(at, 2, [&] { ema->swap_in(); })) continue;
    if (ema->swapped()) {
      if (average::Inside::of(*ema).swap.record()->exchanged > 0) ++failed_twice;
      EXPECT_THROW(ema->update(), Error);
      EXPECT_THROW((void)ema->views(), Error);
      EXPECT_THROW(ema->swap_in(), Error);
      ema->swap_out();
    }
    expect_all_back("stopped at step " + std::to_string(at));
  }
  EXPECT_GE(failed_twice, 5);
}

TEST_F(SwapStopped, OnTheWayOutGoesOnWhereItStood) {
  int at = 0;
  for (bool through = false; !through; ++at) {
    ema->swap_in();
    through = run(at, 1, [&] { ema->swap_out(); });
    EXPECT_EQ(ema->swapped(), !through);
    if (!through) {
      EXPECT_THROW(ema->update(), Error);
    }
    ema->swap_out();
    expect_all_back("stopped at step " + std::to_string(at));
  }
  EXPECT_GE(at, 7);
}

/// Weights that lie elsewhere when they come back.
struct Moved final : average::WeightsMemory {
  explicit Moved(std::vector<TensorView> views) : views_(std::move(views)) {}
  std::vector<TensorView> places(bool /*strict*/) override { return views_; }
  void exchange(const std::function<void()>& /*writes*/, Deadline /*deadline*/) override {}

 private:
  const std::vector<TensorView> views_;
};

TEST_F(SwapStopped, GoesOnWhereItStoodAndFollowsMemoryThatMoved) {
  for (int at = 0; at < 5; ++at) {
    ema->swap_in();
    EXPECT_FALSE(run(at, 1, [&] { ema->swap_out(); })) << at;
    std::vector<uint32_t> moved = memory;  // with what it held
    memory.swap(moved);
    std::fill(moved.begin(), moved.end(), 0xdeadbeef);
    Moved moved_weights(views());
    average::Inside::of(*ema).swap.leave({"swap_out()"}, moved_weights, {});
    EXPECT_EQ(memory, weights);
    ema->bind(views());
    expect_all_back("stopped at step " + std::to_string(at));
  }
}

TEST_F(SwapStopped, ToComeBackToWeightsOfAnotherDtypeStaysOpen) {
  ema->swap_in();
  std::vector<TensorView> cast = views();
  cast[1].dtype = DType::kF16;
  Moved cast_weights(cast);
  EXPECT_THROW(average::Inside::of(*ema).swap.leave({"swap_out()"}, cast_weights, {}), Error);
  EXPECT_NE(average::Inside::of(*ema).swap.record()->why, "");
  ema->swap_out();
  expect_all_back("afterwards");
}

TEST_F(SwapStopped, AsABlockEndsWithoutThrowingAndStaysOpenForSwapOut) {
  {
    const Swapped swapped(*ema);
    EXPECT_TRUE(ema->swapped());
    EXPECT_NE(memory, weights);
  }
  expect_all_back("after the block");
  EXPECT_FALSE(run(1, 1, [&] { const Swapped swapped(*ema); }));
  expect_all_back("where the way in failed");
  {
    const Swapped swapped(*ema, views());
    steps_left = 1;
    stops_left = 1;
  }
  EXPECT_TRUE(ema->swapped());
  EXPECT_THROW(ema->update(), Error);
  ema->swap_out();
  expect_all_back("after swap_out()");
}

/// Calls fn(rank, group) on two threads.
void on_two_ranks(const std::function<void(int, Group&)>& fn) {
  std::vector<std::unique_ptr<Group>> groups = threads(2);
  std::vector<std::thread> workers;
  for (int rank = 0; rank < 2; ++rank)
    workers.emplace_back([&, rank] { fn(rank, *groups[static_cast<size_t>(rank)]); });
  for (std::thread& worker : workers) worker.join();
}

/// Returns averages of two tensors in 64 floats, which `group` divides, after one update; weights differ from them.
Average trained_on(std::vector<float>& memory, Group& group, std::chrono::milliseconds timeout) {
  const std::vector<TensorView> views = {{"a", DType::kF32, Region::whole({48}), memory.data()},
                                         {"b", DType::kF32, Region::whole({16}), memory.data() + 48}};
  Average ema(views, {.schedules = {Schedule::constant(0.5)}, .replicas = &group, .timeout = timeout});
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
  ema.update();
  return ema;
}

TEST(SwapOfReplicas, StoppedOnOneRankComesBackOnAllAtOnce) {
  for (int at = 0; at < 8; ++at) {
    std::atomic<int> through{0};
    average::swap_seam = stop;
    on_two_ranks([&](int rank, Group& group) {
      std::vector<float> memory(64, 1.0f);
      Average ema = trained_on(memory, group, std::chrono::minutes(2));
      const std::vector<float> before = memory;
      steps_left = rank == 1 ? at : -1;
      stops_left = 1;
      try {
        ema.swap_in();
        ++through;
        EXPECT_NE(memory, before);
      } catch (const std::exception&) {  // stopped, or its peer was
        EXPECT_FALSE(ema.swapped());
        EXPECT_EQ(memory, before) << "rank " << rank << " stopped at step " << at;
      }
      steps_left = -1;
      ema.swap_out();
      EXPECT_EQ(memory, before) << "rank " << rank << " stopped at step " << at;
      EXPECT_FALSE(ema.swapped());
    });
    average::swap_seam = nullptr;
    if (through == 2) {
      EXPECT_GE(at, 3);  // before each view, and after the last
      return;
    }
    EXPECT_EQ(through, 0);
  }
  FAIL() << "never got through";
}

TEST(SwapOfReplicas, StoppedWhenAllIsBackOnOneRankEndsWithTheOther) {
  constexpr int kSteps = 3;  // of swap_out(): before each view, and when the parts have been sent
  average::swap_seam = stop;
  on_two_ranks([&](int rank, Group& group) {
    std::vector<float> memory(64, 1.0f);
    Average ema = trained_on(memory, group, std::chrono::seconds(20));
    const std::vector<float> before = memory;
    ema.swap_in();
    steps_left = rank == 1 ? kSteps - 1 : -1;
    stops_left = 1;
    bool stopped = false;
    try {
      ema.swap_out();
    } catch (const Stopped&) {
      stopped = true;
    }
    EXPECT_EQ(stopped, rank == 1);
    EXPECT_EQ(ema.swapped(), stopped);
    EXPECT_NO_THROW(ema.swap_out());
    EXPECT_FALSE(ema.swapped());
    EXPECT_EQ(memory, before);
  });
  average::swap_seam = nullptr;
}

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
