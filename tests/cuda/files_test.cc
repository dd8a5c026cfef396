// Tensors in device memory: what is saved and loaded through pinned chunks, over a device that copies late and in
// pieces.
#include <algorithm>
#include <string>

#include "fake.h"
#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

/// Chunks of pinned memory at one time, by the log.
int most_pinned() {
  int now = 0, most = 0;
  for (const fake::Call& call : fake::world().log) {
    if (call.what == "pin") most = std::max(most, ++now);
    if (call.what == "unpin") --now;
  }
  return most;
}

std::vector<TensorView> on_device(std::vector<TensorView> views) {
  for (TensorView& view : views) view.device = {Device::Kind::kCuda, 0, nullptr};
  return views;
}

/// kSpecs without what is not cast, and a tensor of several chunks.
std::vector<Held> hold_much(const Sharding& sharding, int rank, int ranks, bool filled) {
  std::vector<Spec> specs = kSpecs;
  std::erase_if(specs, [](const Spec& spec) { return spec.dtype == DType::kF8E4M3; });
  specs.push_back({"wide", DType::kF32, {5000, 1501}});
  return hold(specs, sharding, rank, ranks, filled);
}

TEST_F(Checkpoints, OfDeviceMemoryPassesThroughPinnedChunks) {
  uint64_t seed = 0;
  for (const auto& [name, sharding] : kShardings) {
    for (const auto& dtype : {std::optional<DType>(), std::optional(DType::kF64)}) {
      if (kSlow && (std::string(name) != "columns" || dtype)) continue;
      SCOPED_TRACE(name);
      fake::reset({.seed = ++seed});
      SaveOptions options;
      options.dtype = dtype;
      const auto save_from = [&, &how = sharding](const fs::path& path, bool from_device) {
        return on_ranks(3, [&](Group& group) {
          auto held = hold_much(how, group.rank(), 3, true);
          save(group, from_device ? on_device(views_of(held)) : views_of(held), path, options);
        });
      };
      ASSERT_EQ(save_from(folder_ / "host.safetensors", false), all(3, kFine));
      EXPECT_TRUE(fake::world().log.empty());
      ASSERT_EQ(save_from(folder_ / "device.safetensors", true), all(3, kFine));
      EXPECT_TRUE(bytes_of(folder_ / "device.safetensors") == bytes_of(folder_ / "host.safetensors"));
      ASSERT_EQ(on_ranks(2,
                         [&](Group& group) {
                           auto held = hold_much(columns, group.rank(), 2, false),
                                expected = hold_much(columns, group.rank(), 2, true);
                           load(group, on_device(views_of(held)), folder_ / "device.safetensors");
                           for (size_t i = 0; i < held.size(); ++i)
                             EXPECT_EQ(held[i].memory, expected[i].memory) << held[i].view.name;
                         }),
                all(2, kFine));
      EXPECT_EQ(fake::world().streams.pending(), 0u);
      // Two chunks for each of three ranks that save, twice where stripes are exchanged; four for each of two that
      // load.
      EXPECT_LE(most_pinned(), 3 * 4);
    }
  }
}

TEST_F(Checkpoints, OfDeviceViewsAtOneAddressHasTheBytesOfEach) {
  const auto save_both = [&](const fs::path& path, bool from_device) {
    return on_ranks(1, [&](Group& group) {
      Held held("wide", DType::kF32, Region::whole({3 << 20}));
      for (size_t i = 0; i < held.memory.size(); ++i) held.memory[i] = static_cast<std::byte>(i * 31 + i / 251);
      const std::vector<TensorView> views = {held.view,
                                             {"narrow", DType::kI16, Region::whole({6 << 20}), held.view.data}};
      save(group, from_device ? on_device(views) : views, path);
    });
  };
  ASSERT_EQ(save_both(folder_ / "host.safetensors", false), all(1, kFine));
  ASSERT_EQ(save_both(folder_ / "device.safetensors", true), all(1, kFine));
  EXPECT_TRUE(bytes_of(folder_ / "device.safetensors") == bytes_of(folder_ / "host.safetensors"));
}

/// Whichever copy or chunk of pinned memory is refused: an error of the rank's own, the file as it was, and the next
/// save goes through.
TEST_F(Checkpoints, OfDeviceMemoryAreErrorsWhereACopyIsRefused) {
  const fs::path path = folder_ / "model.safetensors";
  ASSERT_EQ(save_as(path, whole, 1), all(1, kFine));
  const std::string before = bytes_of(path);
  const auto try_to_save = [&] {
    return on_ranks(1, [&](Group& group) {
      auto held = hold(whole, 0, 1, true);
      std::erase_if(held, [](const Held& one) { return one.view.name == "half"; });  // another file than before
      save(group, on_device(views_of(held)), path);
    });
  };
  int refused = 0;
  for (int number = 0; refused < 40; ++number, ++refused) {
    fake::fail_copy(number);
    const auto codes = try_to_save();
    fake::fail_copy(-1);
    if (codes == all(1, kFine)) break;
    ASSERT_EQ(codes, all(1, static_cast<int>(Code::kInternal))) << number;
    ASSERT_TRUE(bytes_of(path) == before) << number;
  }
  EXPECT_GE(refused, 5);
  EXPECT_FALSE(bytes_of(path) == before);
  fake::world().streams.until_broken = 3;
  EXPECT_EQ(try_to_save(), all(1, static_cast<int>(Code::kInternal)));
}

}  // namespace
}  // namespace shardow
