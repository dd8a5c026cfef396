// Saves and trainings on ranks and disks that fail, by the seed. SHARDOW_SEED=n replays one run and tells its story;
// SHARDOW_RUNS=n makes so many, or SHARDOW_SECONDS=s as many as go into s seconds, from SHARDOW_FIRST on;
// SHARDOW_PROCESSOR=n on the n-th processor.
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "run.h"
#include "training_run.h"

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

/// One thread goes on at a time, so a second processor would only have to be told of each turn: four times as slow.
class OneProcessor final : public testing::Environment {
  void SetUp() override {
    cpu_set_t allowed, one;
    CPU_ZERO(&one);
    if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    int chosen = ::sched_getcpu();
    if (std::getenv("SHARDOW_PROCESSOR") != nullptr) {
      uint64_t skipped = asked("SHARDOW_PROCESSOR", 0) % static_cast<uint64_t>(CPU_COUNT(&allowed));
      for (chosen = 0; !CPU_ISSET(static_cast<size_t>(chosen), &allowed) || skipped-- > 0;) ++chosen;
    }
    CPU_SET(static_cast<size_t>(chosen), &one);
    ::sched_setaffinity(0, sizeof one, &one);  // where it is refused, things go on slowly
  }
};
const auto* const kOneProcessor = testing::AddGlobalTestEnvironment(new OneProcessor);

/// Seeds that are odd train.
std::string wrong(uint64_t seed, Mutant mutant = Mutant::kNone, std::string* story = nullptr) {
  return seed % 2 == 0 ? wrong_with(seed, folder(), mutant, story) : wrong_with_training(seed, folder(), mutant, story);
}

TEST(Simulate, EverySaveIsTheOldOneOrTheNewOneAndEveryRankKnowsWhich) {
  if (std::getenv("SHARDOW_SEED") != nullptr) {
    std::string story;
    const std::string found = wrong(asked("SHARDOW_SEED", 0), Mutant::kNone, &story);
    std::printf("%s\n%s\n", story.c_str(), found.c_str());
    EXPECT_EQ(found, "");
    return;
  }
  const auto began = std::chrono::steady_clock::now();
  const auto seconds = std::chrono::seconds(asked("SHARDOW_SECONDS", 0));
  const uint64_t first = asked("SHARDOW_FIRST", 0);
  uint64_t made = 0, failed = 0;
  for (; failed < 20 && (seconds.count() > 0 ? std::chrono::steady_clock::now() - began < seconds
                                             : made < asked("SHARDOW_RUNS", kRuns));
       ++made) {
    const std::string found = wrong(first + made);
    if (!found.empty()) {
      ADD_FAILURE() << "SHARDOW_SEED=" << first + made << ": " << found;
      ++failed;
    }
    if ((made + 1) % 50'000 == 0) std::printf("%llu runs\n", static_cast<unsigned long long>(made + 1));
    if ((made + 1) % 50'000 == 0) std::fflush(stdout);
  }
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  std::printf("%llu runs from seed %llu, %.0f a second\n", static_cast<unsigned long long>(made),
              static_cast<unsigned long long>(first), static_cast<double>(made) / took);
}

/// They found what was mended since.
TEST(Simulate, SeedsThatOnceFailed) {
  for (const uint64_t seed : {1005985u, 1006630u, 1029963u, 960u, 1476u, 2112224u, 4021336u, 5359192u, 5507676u,
                              8037268u, 11309708u, 60022677u, 60024452u})
    EXPECT_EQ(wrong(seed), "") << seed;
}

/// The test of the test: each of these mistakes is found.
TEST(Simulate, FindsMistakesThatTheEngineDoesNotMake) {
  for (int mutant = 1; mutant < static_cast<int>(Mutant::kNumMutants); ++mutant) {
    std::fflush(stdout);
    const uint64_t most = asked("SHARDOW_RUNS", 8 * kRuns);
    uint64_t seed = 0;
    std::string found;
    for (; found.empty() && seed < most; ++seed) found = wrong(seed, static_cast<Mutant>(mutant));
    std::printf("mistake %d, seed %llu: %s\n", mutant, static_cast<unsigned long long>(seed - 1), found.c_str());
    EXPECT_NE(found, "") << "mistake " << mutant;
  }
}

}  // namespace
}  // namespace shardow::simulated
