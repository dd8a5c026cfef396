// What the state of an Average is on all its ranks together.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardow/group.h"

namespace shardow::ema {

/// What else must be equal on all ranks, by name, in words for the message where it is not.
using Facts = std::vector<std::pair<std::string, std::string>>;

/// All that must be equal, of one rank, as it travels.
std::string said(const Facts& facts, const std::string& state = {});

/// Throws kInvalidArgument where ranks have said() other things, naming the first. The same on every rank.
void check_same(std::string_view call, const std::vector<std::string>& everybody);

/// `own`, this rank's Average::state(), with what each rank counts for itself summed over the ranks. Throws
/// kInvalidArgument on every rank where ranks have made other updates, or differ in options or facts. Collective.
std::string agreed_state(Group& group, std::string_view call, const std::string& own, const Facts& facts,
                         Deadline deadline);

/// Of a state that agreed_state() gave, what a rank goes on from: rank 0 keeps the sums.
std::string own_part(const std::string& state, int rank);

}  // namespace shardow::ema
