// Random programs over the fake device (program.h): every interleaving of copies, averages, swaps, saves, graphs and
// steps that a seed draws. SHARDOW_SEED=n runs the program of that seed alone; SHARDOW_ALL=1 runs ten thousand.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "fake.h"
#include "program.h"

namespace shardow::testing {
namespace {

char under_way[128];

/// The guard's: the host has touched memory of the device. Says which program did.
void on_fault(int) {
  static_cast<void>(!::write(2, under_way, std::strlen(under_way)));
  std::signal(SIGSEGV, SIG_DFL);
}

std::string alone(uint64_t seed) {
  return "SHARDOW_SEED=" + std::to_string(seed) + " cuda_programs_test --gtest_filter=Programs.Hold";
}

std::string run(uint64_t seed, Missing missing = Missing::kNothing) {
  std::snprintf(under_way, sizeof(under_way), "the host touched memory of a device; to see it alone: %s\n",
                alone(seed).c_str());
  std::signal(SIGSEGV, &on_fault);
  return Program(seed, missing).run();
}

TEST(Programs, Hold) {
  const char *const chosen = std::getenv("SHARDOW_SEED"), *const all = std::getenv("SHARDOW_ALL");
  const uint64_t first = chosen != nullptr ? std::strtoull(chosen, nullptr, 10) : 1;
  const uint64_t count = chosen != nullptr ? 1 : all != nullptr && *all == '1' ? 10000 : 300;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const std::string difference = run(seed);
    ASSERT_EQ(difference, "") << "to see it alone: " << alone(seed);
  }
  for (const auto& [text, times] : Program::met) EXPECT_TRUE(times > 0 || count == 1) << "no program met: " << text;
}

/// The names of all calls of the driver, by any thread.
std::vector<std::pair<std::string, int>> calls_of(uint64_t seed) {
  EXPECT_EQ(run(seed), "");
  std::vector<std::pair<std::string, int>> names;
  for (const fake::Call& call : fake::world().log) names.emplace_back(call.what, call.device);
  return names;
}

TEST(Programs, AreReplayedByTheirSeeds) {
  for (uint64_t seed = 1; seed <= 20; ++seed) ASSERT_EQ(calls_of(seed), calls_of(seed)) << alone(seed);
}

TEST(Programs, HoldWithThreads) {
  for (uint64_t seed = 1; seed <= 40; ++seed) ASSERT_EQ(Program(seed).run_with_threads(), "") << seed;
}

int differing(Missing missing) {
  int number = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) number += run(seed, missing).empty() ? 0 : 1;
  return number;
}

TEST(Programs, TearWhereNothingWaits) {
  EXPECT_GE(differing(Missing::kFinishReading), 10);
  EXPECT_GE(differing(Missing::kWaits), 10);
}

}  // namespace
}  // namespace shardow::testing
