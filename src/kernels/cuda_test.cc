// The device against the reference, with the CPU's tables of cases: equal, not close. Needs a device, or a driver that
// has none (tests/cuda); elsewhere the tests are skipped, loudly.
#include "kernels/cuda.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph_calls.h"
#include "kernels/cuda_driver.h"
#include "kernels/memory.h"
#include "kernels/test_data.h"
#include "shardow/error.h"

namespace shardow::kernels::testing {
namespace {

using cuda::driver;

TEST(CudaBuild, WithoutADeviceEverythingIsRefusedWithAReason) {
  if (cuda::available()) {
    EXPECT_EQ(std::string(cuda::why_not()), "");
    GTEST_SKIP() << "a device answers";
  }
  EXPECT_NE(std::string(cuda::why_not()).find("no CUDA device answers"), std::string::npos) << cuda::why_not();
  EXPECT_THROW(static_cast<void>(cuda::upload({}, Device{})), Error);
  EXPECT_THROW(static_cast<void>(cuda::allocate(16, 0)), Error);
}

/// A stream of our own, as the default stream can't be captured; its context is current.
class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) {
      std::fprintf(stderr, "*** CUDA KERNELS NOT TESTED: %s ***\n", cuda::why_not());
      GTEST_SKIP() << cuda::why_not();
    }
    guard_.emplace(0);
    stream_.emplace(0);
    device_ = Device{Device::Kind::kCuda, 0, stream()};
  }
  void TearDown() override {
    stream_.reset();
    guard_.reset();
  }
  void* stream() const { return stream_->get(); }
  void wait() { driver().synchronize(stream()); }

  std::optional<cuda::DeviceGuard> guard_;
  std::optional<cuda::Stream> stream_;
  Device device_;
};

/// A buffer's twin in device memory, guards and misalignment included.
class Twin {
 public:
  explicit Twin(Buffer& host) : host_(host), memory_(host.whole_bytes(), Device{Device::Kind::kCuda, 0}) {
    copy(memory_.data(), host.whole());
  }
  void* data() { return memory_.data() + (host_.data() - host_.whole()); }
  void fetch() { copy(host_.whole(), memory_.data()); }

 private:
  void copy(void* to, const void* from) {
    driver().copy(to, from, host_.whole_bytes(), nullptr);
    driver().synchronize(nullptr);
  }

  Buffer& host_;
  Memory memory_;
};

/// Problems on the device, and the chunks that point there.
class OnDevice {
 public:
  explicit OnDevice(std::vector<Problem>& problems) {
    for (Problem& problem : problems) {
      Chunk chunk = problem.chunk();
      chunk.parameter = twins_.emplace_back(std::make_unique<Twin>(problem.parameter))->data();
      for (size_t k = 0; k < problem.averages.size(); ++k) {
        chunk.averages[k] = twins_.emplace_back(std::make_unique<Twin>(problem.averages[k]))->data();
      }
      chunks.push_back(chunk);
    }
  }
  void fetch() {
    for (auto& twin : twins_) twin->fetch();
  }

  std::vector<Chunk> chunks;

 private:
  std::vector<std::unique_ptr<Twin> > twins_;
};

std::vector<Chunk> host_chunks(std::vector<Problem>& problems) {
  std::vector<Chunk> chunks;
  for (Problem& problem : problems) chunks.push_back(problem.chunk());
  return chunks;
}

void expect_equal(const std::vector<Problem>& actual, const std::vector<Problem>& expected, const Step& step) {
  for (size_t i = 0; i < actual.size(); ++i)
    ASSERT_TRUE(actual[i] == expected[i]) << "chunk " << i << ": " << describe(actual[i], step);
}

/// The same update on the device and in the reference.
void expect_equals_reference(const std::vector<Problem>& problems, const Step& step, Device device) {
  std::vector<Problem> actual = problems, expected = problems;
  const Tally wanted = reference::update(host_chunks(expected), step);
  OnDevice on_device(actual);
  const auto table = cuda::upload(on_device.chunks, device);
  table->update(step);
  const Tally tally = table->read_tally(), again = table->read_tally();
  on_device.fetch();
  expect_equal(actual, expected, step);
  EXPECT_EQ(tally.non_finite, wanted.non_finite);
  EXPECT_EQ(tally.first_chunk, wanted.first_chunk);
  EXPECT_EQ(again.non_finite, 0) << "read_tally() counts since the last read_tally()";
  EXPECT_EQ(again.first_chunk, -1);
}

TEST_F(Cuda, UpdateEqualsReferenceForEveryPairFormAndNumberOfAverages) {
  const bool all = std::getenv("SHARDOW_ALL") != nullptr;
  Random random(1);
  for (const Pair& pair : all_pairs()) {
    for (const Form form : kForms) {
      int turn = 0;
      for (const double weight : {1e-6, 1e-3, 0.3, 0.5, 0.9}) {
        for (const int num_averages : {1, 2, 3, 8}) {
          // A fake device computes long: two or three weights for each number, in turns.
          if (const int at = turn++; !all && (at + at / 4) % 2 == 1) continue;
          Step step = make_step(num_averages, random() % 2 == 0, random);
          step.averages.fill(one(form, weight));
          std::vector<Problem> problems;
          for (const Values values : {Values::kFinite, Values::kFewNotFinite, Values::kAnyBits}) {
            for (const size_t offset : {size_t{0}, random() % 8}) {
              problems.emplace_back(pair.first, pair.second, num_averages, 1 + static_cast<int64_t>(random() % 1500),
                                    offset, offset, values, random);
            }
          }
          expect_equals_reference(problems, step, device_);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(Cuda, UpdateEqualsReferenceForEveryLengthAndOffset) {
  Random random(2);
  for (const Pair& pair : all_pairs()) {
    std::vector<Problem> problems;
    for (int64_t count = 0; count <= 600; ++count) {
      problems.emplace_back(pair.first, pair.second, 1, count, random() % 8, count % 2 == 0 ? 0 : random() % 8,
                            Values::kFewNotFinite, random);
    }
    expect_equals_reference(problems, random_step(pair.second, 1, true, random), device_);
    if (HasFailure()) return;
  }
}

TEST_F(Cuda, UpdateEqualsReferenceForMixedDtypesInOneTable) {
  Random random(3);
  for (const DType average : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    std::vector<Problem> problems;
    for (const Pair& pair : all_pairs()) {
      if (pair.second != average) continue;
      for (const int64_t count : {0, 7, 4096, 100003})
        problems.emplace_back(pair.first, pair.second, 2, count, 0, 0, Values::kFewNotFinite, random);
    }
    Step step = make_step(2, true, random);
    step.averages.fill(one(Form::kStochastic, 1e-5));
    expect_equals_reference(problems, step, device_);
  }
}

TEST_F(Cuda, ATableOfAveragesOfSeveralDtypesIsRefused) {
  Random random(9);
  std::vector<Problem> problems;
  for (const DType average : {DType::kF32, DType::kF64})
    problems.emplace_back(DType::kF32, average, 1, 10, 0, 0, Values::kFinite, random);
  OnDevice on_device(problems);
  EXPECT_THROW(static_cast<void>(cuda::upload(on_device.chunks, device_)), Error);
}

std::vector<Problem> simple_problems(Random& random) {
  std::vector<Problem> problems;
  for (const int64_t count : {5, 3000, 70000})
    problems.emplace_back(DType::kBF16, DType::kF32, 2, count, 0, 0, Values::kFinite, random);
  return problems;
}

TEST_F(Cuda, AGraphReplaysWithTheLatestStep) {
  Random random(5);
  std::vector<Problem> actual = simple_problems(random), expected = actual;
  OnDevice on_device(actual);
  const auto table = cuda::upload(on_device.chunks, device_);
  const Step captured = random_step(DType::kF32, 2, true, random);
  const StreamsByDevice streams{{0, stream()}};
  const Recording recording(streams, kThreadLocal, [&] { table->update(captured); });
  ASSERT_EQ(recording.launch(streams), 0);  // before the first set_step(): does nothing
  for (int i = 0; i < 50; ++i) {            // more than there are pinned slots, and without waiting
    const Step step = random_step(DType::kF32, 2, true, random);
    table->set_step(step);
    ASSERT_EQ(recording.launch(streams), 0);
    static_cast<void>(reference::update(host_chunks(expected), step));
  }
  wait();
  on_device.fetch();
  expect_equal(actual, expected, captured);
}

TEST_F(Cuda, ConsecutiveUpdatesDoNotWaitForTheirSteps) {
  Random random(6);
  std::vector<Problem> actual = simple_problems(random), expected = actual;
  OnDevice on_device(actual);
  const auto table = cuda::upload(on_device.chunks, device_);
  Step step = random_step(DType::kF32, 2, true, random);
  for (step.step = 0; step.step < 100; ++step.step) {
    table->update(step);
    static_cast<void>(reference::update(host_chunks(expected), step));
  }
  wait();
  on_device.fetch();
  expect_equal(actual, expected, step);
}

/// All in one launch.
TEST_F(Cuda, SwapEqualsReferenceAndIsUndone) {
  Random random(7);
  std::vector<Problem> before;
  for (const Pair& pair : all_pairs()) {
    if (!swaps_in_place(pair.first, pair.second)) continue;
    for (const int64_t count : {0, 1, 8, 31, 1000, 50001}) {
      for (const size_t offset : {0, 1, 8})
        before.emplace_back(pair.first, pair.second, 1, count, offset, offset, Values::kAnyBits, random);
    }
  }
  std::vector<Problem> actual = before, swapped = before;
  OnDevice on_device(actual);
  std::vector<TensorView> parameters, averages;
  for (size_t i = 0; i < before.size(); ++i) {
    const Chunk host = swapped[i].chunk(), &device = on_device.chunks[i];
    reference::swap(const_cast<void*>(host.parameter), host.parameter_dtype, host.averages[0], host.average_dtype,
                    host.count, Direction::kIn);
    const Region region = Region::whole({host.count});
    parameters.push_back({"p", host.parameter_dtype, region, const_cast<void*>(device.parameter), device_});
    averages.push_back({"p", host.average_dtype, region, device.averages[0], device_});
  }
  for (const Direction direction : {Direction::kIn, Direction::kOut}) {
    cuda::swap(parameters, averages, direction);
    wait();
    on_device.fetch();
    const std::vector<Problem>& expected = direction == Direction::kIn ? swapped : before;
    for (size_t i = 0; i < actual.size(); ++i)
      ASSERT_TRUE(actual[i] == expected[i]) << "problem " << i << " of " << actual[i].count;
  }
}

TEST_F(Cuda, CopyEqualsReferencesCast) {
  Random random(10);
  for (const Pair& pair : all_pairs()) {
    std::vector<Problem> actual;
    for (const int64_t count : {0, 1, 31, 256, 1000, 50001}) {
      for (const size_t offset : {0, 3})
        actual.emplace_back(pair.first, pair.second, 2, count, offset, offset, Values::kAnyBits, random);
    }
    std::vector<Problem> expected = actual;
    for (Problem& problem : expected) {
      for (Buffer& average : problem.averages)
        reference::cast(problem.parameter.data(), pair.first, average.data(), pair.second, problem.chunk().count);
    }
    OnDevice on_device(actual);
    cuda::upload(on_device.chunks, device_)->copy(2);
    wait();
    on_device.fetch();
    for (size_t i = 0; i < actual.size(); ++i) ASSERT_TRUE(actual[i] == expected[i]) << pair << ", " << i;
  }
}

TEST_F(Cuda, CastEqualsReference) {
  Random random(8);
  for (const Pair& pair : all_pairs()) {
    for (const int64_t count : {0, 1, 8, 31, 1000, 50001}) {
      for (const size_t offset : {0, 3}) {
        Problem expected(pair.first, pair.second, 1, count, offset, offset, Values::kAnyBits, random);
        std::vector<Problem> actual = {expected};
        reference::cast(expected.parameter.data(), pair.first, expected.averages[0].data(), pair.second, count);
        OnDevice on_device(actual);
        cuda::cast(on_device.chunks[0].parameter, pair.first, on_device.chunks[0].averages[0], pair.second, count,
                   device_);
        wait();
        on_device.fetch();
        ASSERT_TRUE(actual[0] == expected) << pair << ", " << count;
      }
    }
  }
}

TEST_F(Cuda, ErrorsCarryTheDriversMessage) {
  try {
    static_cast<void>(cuda::allocate(size_t{1} << 60, 0));
    FAIL() << "an exabyte was allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kOutOfMemory);
    EXPECT_NE(std::string(error.what()).find("out of memory"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace shardow::kernels::testing
