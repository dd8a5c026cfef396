// Every interleaving of small programs: not drawn, but enumerated, depth first. One rank and its saves in the
// background: all there are. Two ranks: all in which the turn is taken from a thread that could go on at most so many
// times, which is where such faults are found (Musuvathi and Qadeer, "Iterative context bounding for systematic testing
// of multithreaded programs", PLDI 2007).
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "training_run.h"

namespace shardow::simulated {
namespace {

/// Choices as they were made, and how many there were at each point.
class Explorer {
 public:
  explicit Explorer(size_t most_taken) : most_taken_(most_taken) {}

  Simulation::Chooser chooser() {
    at_ = taken_ = 0;
    return [this](size_t able, bool stays) {
      if (at_ == path_.size()) path_.push_back({0, stays && taken_ == most_taken_ ? 1 : able, stays});
      const Point& point = path_[at_++];
      taken_ += point.stays && point.chosen > 0 ? 1 : 0;
      return point.chosen;
    };
  }

  /// To the next interleaving; false where there is none.
  bool next() {
    path_.resize(at_);
    while (!path_.empty() && path_.back().chosen + 1 == path_.back().able) path_.pop_back();
    if (!path_.empty()) ++path_.back().chosen;
    return !path_.empty();
  }

 private:
  struct Point {
    size_t chosen, able;
    bool stays;
  };
  const size_t most_taken_;
  size_t at_ = 0, taken_ = 0;
  std::vector<Point> path_;
};

struct Found {
  size_t interleavings = 0;
  std::string wrong;
};

Found explore(const Program& program, size_t most_taken, size_t most = SIZE_MAX, Mutant mutant = Mutant::kNone) {
  const std::filesystem::path memory = "/dev/shm";
  const auto folder = (std::filesystem::is_directory(memory) ? memory : std::filesystem::path(testing::TempDir())) /
                      ("explore_" + std::to_string(::getpid()));
  Explorer explorer(most_taken);
  Found found;
  do {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    Simulation simulation(1);
    simulation.choose_by(explorer.chooser());
    found.wrong = wrong_with_program(simulation, program, {.mutant = mutant}, folder);
    ++found.interleavings;
  } while (found.wrong.empty() && found.interleavings < most && explorer.next());
  std::filesystem::remove_all(folder);
  return found;
}

Program of(int ranks, std::vector<Op> ops) {
  Program program;
  program.job.ranks = ranks;
  program.ops = std::move(ops);
  return program;
}

struct Case {
  const char* name;
  std::vector<Op> ops;
  size_t most_taken = SIZE_MAX;  ///< of one rank: where two saves go on at a time, there are too many
};

const std::vector<Case> kCases = {
    {"a step while weights are written", {{What::kTrain}, {What::kAsync, 0}, {What::kTrain}}},
    {"a step while averages are written", {{What::kTrain}, {What::kAsync, 1}, {What::kTrain}}},
    {"a swap while weights are written", {{What::kTrain}, {What::kAsync, 0}, {What::kSwap}, {What::kSwap}}},
    {"a step between two swaps",
     {{What::kTrain}, {What::kSwap}, {What::kAsync, 0}, {What::kSwap}, {What::kTrain}, {What::kSwap}, {What::kSwap}}},
    {"reset and a step", {{What::kTrain}, {What::kAsync, 1}, {What::kReset}, {What::kTrain}}},
    {"a second one asked for",
     {{What::kTrain}, {What::kAsync, 0}, {What::kTrain}, {What::kAsync, 0}, {What::kTrain}},
     3},
    {"two at a time", {{What::kTrain}, {What::kAsync, 0}, {What::kAsync, 1}, {What::kTrain}}, 3},
    {"a save meanwhile", {{What::kTrain}, {What::kAsync, 0}, {What::kTrain}, {What::kSave, 1}}, 3},
    {"a load meanwhile", {{What::kTrain}, {What::kAsync, 1}, {What::kLoad}, {What::kTrain}}, 3},
};

bool whole() {
  return std::getenv("SHARDOW_ALL") != nullptr;
}

TEST(Explore, EveryInterleavingOfOneRankSavesOneStep) {
  for (const Case& one : kCases) {
    const Found found = explore(of(1, one.ops), whole() ? one.most_taken : 2, whole() ? SIZE_MAX : 60);
    std::printf("%s: %zu interleavings\n", one.name, found.interleavings);
    std::fflush(stdout);
    EXPECT_EQ(found.wrong, "") << one.name << ", interleaving " << found.interleavings;
  }
}

TEST(Explore, EveryInterleavingOfTwoRanksWithFewTurnsTakenSavesOneStep) {
  for (const Case& one : kCases) {
    const Found found = explore(of(2, one.ops), 1, whole() ? SIZE_MAX : 60);
    std::printf("%s: %zu interleavings\n", one.name, found.interleavings);
    std::fflush(stdout);
    EXPECT_EQ(found.wrong, "") << one.name << ", interleaving " << found.interleavings;
  }
}

/// The test of the test.
TEST(Explore, FindsMistakesOfSavesInTheBackground) {
  const std::vector<std::pair<Mutant, size_t>> mistakes = {
      {Mutant::kStagesLate, 0}, {Mutant::kSwapLeaks, 2}, {Mutant::kOvertakes, 5}, {Mutant::kReusesMemory, 6}};
  for (const auto& [mutant, program] : mistakes) {
    for (const int ranks : {1, 2}) {
      if (ranks == 2 && mutant == Mutant::kOvertakes) continue;  // needs more turns taken
      const Found found = explore(of(ranks, kCases[program].ops), 1, 2'000, mutant);
      std::printf("%s, %d ranks, interleaving %zu: %s\n", kCases[program].name, ranks, found.interleavings,
                  found.wrong.c_str());
      EXPECT_NE(found.wrong, "") << kCases[program].name;
    }
  }
}

}  // namespace
}  // namespace shardow::simulated
