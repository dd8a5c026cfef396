// agree() of include/shardow/group.h, for steps whose outcome the others need.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "shardow/group.h"

namespace shardow::group {

/// What is made of every rank's words, by rank; see Ranks::decide().
using SumUp = std::function<std::string(const std::vector<std::string>&)>;

/// agree(), with what `sum_up` makes of what `fn` returned on each rank, on one of them, for all; empty where all
/// returned nothing. What it throws is thrown on all ranks. `deadline()` is asked before `fn` and after it.
std::string agree_on(Group& group, const std::function<Deadline()>& deadline, const std::function<std::string()>& fn,
                     const SumUp& sum_up);

}  // namespace shardow::group
