// An update of averages on the host allocates nothing, on any thread. The fake driver allocates for each call, so that
// here the layer's whole view of devices is replaced: memory is the host's, and copies are done when they are asked
// for.
#include "base/allocations.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/cuda.h"
#include "shardow/average.h"

namespace shardow::kernels::cuda {
namespace {

class Now final : public Link {
 public:
  void follow(void* /*stream*/) override {}
  void join(void* /*stream*/, void* /*behind*/) override {}
  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void mark(size_t /*which*/) override {}
  void wait(size_t /*which*/) override {}
  void hold(void* /*stream*/, size_t /*which*/) override {}
  void drain() noexcept override {}
};

}  // namespace

bool available() noexcept {
  return true;
}
const char* why_not() noexcept {
  return "";
}
bool capturing(const Device& /*device*/) {
  return false;
}
std::unique_ptr<Table> upload(std::span<const Chunk> /*chunks*/, Device /*device*/) {
  return nullptr;
}
void finish(const Device& /*device*/) {}
void swap(std::span<const TensorView> /*parameters*/, std::span<const TensorView> /*averages*/,
          Direction /*direction*/) {}
void cast(const void* /*from*/, DType /*from_dtype*/, void* /*to*/, DType /*to_dtype*/, int64_t /*count*/,
          Device /*device*/) {}
void* allocate(size_t bytes, int /*index*/) {
  return ::operator new(bytes);
}
void release(void* memory, int /*index*/) noexcept {
  ::operator delete(memory);
}
size_t rest_of_allocation(const void* /*memory*/, int /*index*/) noexcept {
  return size_t{1} << 40;
}
void* pin(size_t bytes, int index) {
  return allocate(bytes, index);
}
void unpin(void* memory, int index) noexcept {
  release(memory, index);
}
std::unique_ptr<Copy> begin_copy(void* /*to*/, const void* /*from*/, size_t /*bytes*/, Device /*device*/) {
  return nullptr;
}
std::unique_ptr<Link> make_link(int /*index*/, size_t /*num_marks*/) {
  return std::make_unique<Now>();
}

}  // namespace shardow::kernels::cuda

namespace shardow {
namespace {

TEST(OffloadAllocations, AnUpdateMakesNone) {
  constexpr int64_t kCount = 1 << 20;
  for (const int64_t ring_bytes : {int64_t{1} << 16, int64_t{1} << 20, int64_t{1} << 26}) {
    std::vector<uint16_t> weights(kCount);
    std::vector<float> average(kCount);
    const Region columns = Region::grid({1024, 2048}, {{{0, 1024}}, {{7, 1031}}});
    const std::vector<TensorView> views = {
        {"p", DType::kBF16, columns, weights.data(), {Device::Kind::kCuda, 0, nullptr}}};
    const std::vector<std::vector<TensorView>> averages = {{{"p", DType::kF32, columns, average.data(), {}}}};
    AverageOptions options{.schedules = {Schedule::constant(0.99)}, .rounding = Rounding::kStochastic};
    options.ring_bytes = ring_bytes;
    options.num_threads = 2;
    Average ema(views, averages, options);
    const auto update = [&] {
      ema.update();
      ema.finish_reading();
      ema.wait();
    };
    update();  // starts the threads
    EXPECT_EQ(base::allocations_of([&] {
                for (int i = 0; i < 5; ++i) update();
              }),
              0);
    EXPECT_EQ(ema.stats().offload_bytes, 6 * 2 * kCount);
  }
}

}  // namespace
}  // namespace shardow
