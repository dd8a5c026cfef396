// One run of a simulated training: steps, swaps and saves of ranks that fail, saves in the background, somebody who
// reads meanwhile, and what must be true of all checkpoints at any moment.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "trainer.h"

namespace shardow::simulated {

/// What goes wrong, and who looks on.
struct Weather {
  std::vector<Fault> faults = {};
  Mutant mutant = Mutant::kNone;
  bool through_store = false, reader = false;
};

/// What is wrong when all have ended; "" where all is well. `folder`: empty. `after`, where it is given, is called
/// while what was recorded of the disk is there.
using After = std::function<std::string(const Expected&, const testing_disk::Recording&)>;
std::string wrong_with_program(Simulation& simulation, const Program& program, const Weather& weather,
                               const std::filesystem::path& folder, const After& after = {});

/// Of the seed's own program; and after a power cut, and the next saves. `story`: filled with what went on, if it is
/// given.
std::string wrong_with_training(uint64_t seed, const std::filesystem::path& folder, Mutant mutant = Mutant::kNone,
                                std::string* story = nullptr);

}  // namespace shardow::simulated
