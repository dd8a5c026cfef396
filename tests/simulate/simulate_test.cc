// Saves on ranks and disks that fail, by the seed. SHARDOW_SEED=n replays one run and tells its story; SHARDOW_RUNS=n makes so many, or
// SHARDOW_SECONDS=s as many as go into s seconds, from SHARDOW_FIRST on.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "run.h"

namespace shardow::simulated {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kRuns = 200;
#else
constexpr uint64_t kRuns = 2000;
#endif

uint64_t asked(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::filesystem::path folder() {
  const std::filesystem::path memory = "/dev/shm";
  return (std::filesystem::is_directory(memory) ? memory : std::filesystem::path(testing::TempDir())) /
         ("simulate_" + std::to_string(::getpid()));
}

TEST(Simulate, EverySaveIsTheOldOneOrTheNewOneAndEveryRankKnowsWhich) {
  if (std::getenv("SHARDOW_SEED") != nullptr) {
    std::string story;
    const std::string wrong = wrong_with(asked("SHARDOW_SEED", 0), folder(), Mutant::kNone, &story);
    std::printf("%s\n%s\n", story.c_str(), wrong.c_str());
    EXPECT_EQ(wrong, "");
    return;
  }
  const auto began = std::chrono::steady_clock::now();
  const auto seconds = std::chrono::seconds(asked("SHARDOW_SECONDS", 0));
  const uint64_t first = asked("SHARDOW_FIRST", 0);
  uint64_t made = 0;
  for (; seconds.count() > 0 ? std::chrono::steady_clock::now() - began < seconds : made < asked("SHARDOW_RUNS", kRuns); ++made) {
    const std::string wrong = wrong_with(first + made, folder());
    if (!wrong.empty()) ADD_FAILURE() << "SHARDOW_SEED=" << first + made << ": " << wrong;
  }
  std::printf("%llu runs\n", static_cast<unsigned long long>(made));
}

/// The test of the test: each of these mistakes is found.
TEST(Simulate, FindsMistakesThatTheEngineDoesNotMake) {
  for (int mutant = 1; mutant < kNumMutants; ++mutant) {
    std::fflush(stdout);
    const uint64_t most = asked("SHARDOW_RUNS", 4 * kRuns);
    uint64_t seed = 0;
    std::string wrong;
    while (wrong.empty() && seed < most) wrong = wrong_with(seed++, folder(), static_cast<Mutant>(mutant));
    std::printf("mistake %d, seed %llu: %s\n", mutant, static_cast<unsigned long long>(seed - 1), wrong.c_str());
    EXPECT_NE(wrong, "") << "mistake " << mutant;
  }
}

}  // namespace
}  // namespace shardow::simulated
