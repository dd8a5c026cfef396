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

const Device kDevice{Device::Kind::kCuda, 0, nullptr};

TEST_F(Checkpoints, OfDeviceMemoryPassesThroughPinnedChunks) {
  uint64_t seed = 0;
  std::erase_if(specs_, [](const Spec& spec) { return spec.dtype == DType::kF8E4M3; });  // is not cast
  specs_.push_back({"wide", DType::kF32, {5000, 1501}});                                 // of several chunks
  for (const auto& [name, sharding] : kShardings) {
    for (const auto& dtype : {std::optional<DType>(), std::optional(DType::kF64)}) {
      if (kSlow && (std::string(name) != "columns" || dtype)) continue;
      SCOPED_TRACE(name);
      fake::reset({.seed = ++seed});
      SaveOptions options;
      options.dtype = dtype;
      device_ = {};
      ASSERT_EQ(save_as(folder_ / "host.safetensors", sharding, 3, options), all(3, kFine));
      EXPECT_TRUE(fake::world().log.empty());
      device_ = kDevice;
      ASSERT_EQ(save_as(folder_ / "device.safetensors", sharding, 3, options), all(3, kFine));
      EXPECT_TRUE(bytes_of(folder_ / "device.safetensors") == bytes_of(folder_ / "host.safetensors"));
      ASSERT_EQ(load_as(folder_ / "device.safetensors", columns, 2), all(2, kFine));
      EXPECT_EQ(fake::world().streams.pending(), 0u);
      // Two chunks for each of three ranks that save, twice where stripes are exchanged; four for each of two that
      // load.
      EXPECT_LE(most_pinned(), 3 * 4);
    }
  }
}

TEST_F(Checkpoints, OfDeviceViewsAtOneAddressHasTheBytesOfEach) {
  std::vector<std::string> files;
  for (const Device& device : {Device{}, kDevice}) {
    const auto save_both = [&](Group& group) {
      Held held("wide", DType::kF32, Region::whole({3 << 20}));
      for (size_t i = 0; i < held.memory.size(); ++i) held.memory[i] = static_cast<std::byte>(i * 31 + i / 251);
      const TensorView wide{"wide", DType::kF32, held.view.region, held.view.data, device};
      const TensorView narrow{"narrow", DType::kI16, Region::whole({6 << 20}), held.view.data, device};
      save(group, std::vector{wide, narrow}, folder_ / "model.safetensors");
    };
    ASSERT_EQ(on_ranks(1, save_both), all(1, kFine));
    files.push_back(bytes_of(folder_ / "model.safetensors"));
  }
  EXPECT_TRUE(files[0] == files[1]);
}

/// Whichever copy or chunk of pinned memory is refused: an error of the rank's own, the file as it was, and the next
/// save goes through.
TEST_F(Checkpoints, OfDeviceMemoryAreErrorsWhereACopyIsRefused) {
  const fs::path path = folder_ / "model.safetensors";
  ASSERT_EQ(save_as(path, whole, 1), all(1, kFine));
  const std::string before = bytes_of(path);
  std::erase_if(specs_, [](const Spec& spec) { return spec.name == "half"; });  // another file than before
  device_ = kDevice;
  int refused = 0;
  for (int number = 0; refused < 40; ++number, ++refused) {
    fake::fail_copy(number);
    const auto codes = save_as(path, whole, 1);
    fake::fail_copy(-1);
    if (codes == all(1, kFine)) break;
    ASSERT_EQ(codes, all(1, static_cast<int>(Code::kInternal))) << number;
    ASSERT_TRUE(bytes_of(path) == before) << number;
  }
  EXPECT_GE(refused, 5);
  EXPECT_FALSE(bytes_of(path) == before);
  fake::world().streams.until_broken = 3;
  EXPECT_EQ(save_as(path, whole, 1), all(1, static_cast<int>(Code::kInternal)));
}

}  // namespace
}  // namespace shardow
