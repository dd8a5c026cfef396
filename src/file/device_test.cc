// Tensors in device memory, with a device of the test's own: what is saved and loaded through pinned chunks.
#include "file/device.h"

#include <atomic>
#include <cstdlib>

#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

/// Memory that only copies reach, which happen when somebody waits for them.
class FakeDevice : public file::Devices {
 public:
  void* pin(size_t bytes, int) override { return (++pinned_, std::malloc(bytes)); }
  void unpin(void* memory, int) noexcept override { std::free((--pinned_, memory)); }
  std::unique_ptr<kernels::cuda::Copy> begin_copy(void* to, const void* from, size_t bytes, Device) override {
    most_ = std::max<int>(most_, pinned_);
    struct Late final : kernels::cuda::Copy {
      void* to;
      const void* from;
      size_t bytes;
      Late(void* t, const void* f, size_t b) : to(t), from(f), bytes(b) {}
      void wait() override { std::memcpy(to, from, bytes); }
    };
    return std::make_unique<Late>(to, from, bytes);
  }

  int pinned() const { return pinned_; }
  int most() const { return most_; }

 private:
  std::atomic<int> pinned_{0}, most_{0};
};

std::vector<TensorView> on_device(std::vector<TensorView> views) {
  for (TensorView& view : views) view.device = {Device::Kind::kCuda, 0, nullptr};
  return views;
}

/// What hold() gives without what is not cast, and a tensor of several chunks.
std::vector<Held> hold_much(const Sharding& sharding, int rank, int ranks, bool filled) {
  std::vector<Held> held = hold(sharding, rank, ranks, filled);
  std::erase_if(held, [](const Held& one) { return one.view.dtype == DType::kF8E4M3; });
  const Spec wide{"wide", DType::kF32, {5000, 1501}};
  Held& one = held.emplace_back(wide.name, wide.dtype, sharding(wide.shape, rank, ranks));
  if (!filled) return held;
  one.view.region.for_each_run([&](const Run& run) {
    for (int64_t i = 0; i < run.length * 4; ++i)
      one.memory[static_cast<size_t>(run.local_begin * 4 + i)] = value(wide, run.global_begin * 4 + i);
  });
  return held;
}

TEST_F(Checkpoints, OfDeviceMemoryPassesThroughPinnedChunks) {
  FakeDevice device;
  machine_.devices = &device;
  for (const auto& [name, sharding] : kShardings) {
    for (const auto& dtype : {std::optional<DType>(), std::optional(DType::kF64)}) {
      if (kSlow && (std::string(name) != "columns" || dtype)) continue;
      SCOPED_TRACE(name);
      SaveOptions options;
      options.dtype = dtype;
      const auto save_from = [&, &how = sharding](const fs::path& path, bool from_device) {
        return on_ranks(3, [&](Group& group) {
          auto held = hold_much(how, group.rank(), 3, true);
          save(group, from_device ? on_device(views_of(held)) : views_of(held), path, options);
        });
      };
      ASSERT_EQ(save_from(folder_ / "host.safetensors", false), all(3, kFine));
      ASSERT_EQ(save_from(folder_ / "device.safetensors", true), all(3, kFine));
      EXPECT_TRUE(bytes_of(folder_ / "device.safetensors") == bytes_of(folder_ / "host.safetensors"));
      ASSERT_EQ(on_ranks(2,
                         [&](Group& group) {
                           auto held = hold_much(columns, group.rank(), 2, false), expected = hold_much(columns, group.rank(), 2, true);
                           load(group, on_device(views_of(held)), folder_ / "device.safetensors");
                           for (size_t i = 0; i < held.size(); ++i) EXPECT_EQ(held[i].memory, expected[i].memory) << held[i].view.name;
                         }),
                all(2, kFine));
    }
  }
  machine_.devices = nullptr;
  EXPECT_EQ(device.pinned(), 0);
  EXPECT_LE(device.most(),
            3 * 4);  // two chunks for each of three ranks that save, twice where stripes are exchanged; four for each of two that load
}

TEST_F(Checkpoints, OfDeviceViewsAtOneAddressHasTheBytesOfEach) {
  FakeDevice device;
  machine_.devices = &device;
  const auto save_both = [&](const fs::path& path, bool from_device) {
    return on_ranks(1, [&](Group& group) {
      Held held("wide", DType::kF32, Region::whole({3 << 20}));
      for (size_t i = 0; i < held.memory.size(); ++i) held.memory[i] = static_cast<std::byte>(i * 31 + i / 251);
      const std::vector<TensorView> views = {held.view, {"narrow", DType::kI16, Region::whole({6 << 20}), held.view.data}};
      save(group, from_device ? on_device(views) : views, path);
    });
  };
  ASSERT_EQ(save_both(folder_ / "host.safetensors", false), all(1, kFine));
  ASSERT_EQ(save_both(folder_ / "device.safetensors", true), all(1, kFine));
  EXPECT_TRUE(bytes_of(folder_ / "device.safetensors") == bytes_of(folder_ / "host.safetensors"));
  machine_.devices = nullptr;
}

}  // namespace
}  // namespace shardow
