// A thousand saves in the background of one process: it holds no more afterwards than after a hundred.
#include <filesystem>
#include <future>
#include <iterator>

#include "file/checkpoint_fixture.h"

namespace shardow {
namespace {

struct Holds {
  long memory;  ///< resident, in bytes
  long descriptors, threads;
};

Holds holds() {
  long all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  const auto entries = [](const char* path) {
    return static_cast<long>(std::distance(fs::directory_iterator(path), {}));
  };
  return {resident * ::sysconf(_SC_PAGESIZE), entries("/proc/self/fd"), entries("/proc/self/task")};
}

TEST(ManySaves, HoldNoMoreThanFew) {
  const fs::path memory = "/dev/shm";
  const fs::path folder =
      (fs::is_directory(memory) ? memory : fs::path(testing::TempDir())) / ("many_saves_" + std::to_string(::getpid()));
  fs::create_directories(folder);
  const int saves = kSlow ? 200 : 1000;
  Held held("a", DType::kF32, Region::whole({40, 3}));
  std::vector<std::byte> staging(held.memory.size());
  const auto group = solo();
  Holds few{}, many{};
  for (int i = 1; i <= saves; ++i) {
    std::fill(held.memory.begin(), held.memory.end(), static_cast<std::byte>(i % 100));
    StagedSave save(*group, std::span(&held.view, 1), folder / ("model" + std::to_string(i % 3)));
    save.stage(staging);
    auto written = std::async(std::launch::async, [&] { save.write(); });
    std::fill(held.memory.begin(), held.memory.end(), std::byte{0xee});
    written.get();
    if (i == saves / 10) few = holds();
    if (i == saves) many = holds();
  }
  std::fill(staging.begin(), staging.end(), static_cast<std::byte>(saves % 100));
  load(*group, std::span(&held.view, 1), folder / ("model" + std::to_string(saves % 3)));
  EXPECT_EQ(held.memory, staging);
  fs::remove_all(folder);
  EXPECT_LT(many.memory - few.memory, kSlow ? 1 << 30 : 4 << 20);  // sanitizers keep what is freed
  EXPECT_LE(many.descriptors, few.descriptors + 2);
  EXPECT_LE(many.threads, few.threads + 2);
}

}  // namespace
}  // namespace shardow
