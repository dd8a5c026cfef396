// One run of a simulation: a save over what was there, on ranks and disks that fail, and what must be true afterwards.
#pragma once

#include <cstdint>
#include <string>

#include "world.h"

namespace shardow::simulated {

/// What is wrong after the run of `seed`; nothing where all is well. `story`: filled with what went on, if it is given.
std::string wrong_with(uint64_t seed, const std::filesystem::path& folder, Mutant mutant = Mutant::kNone,
                       std::string* story = nullptr);

}  // namespace shardow::simulated
