// agree() of include/shardow/group.h, for steps whose outcome the others need.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "shardow/error.h"
#include "shardow/group.h"

namespace shardow::group {

/// A rank has it at least to tell the others how its step went; one that waited in vain waits no longer.
inline constexpr std::chrono::seconds kToTell{1};

/// What a rank that waits for a dead or late one gets, which differs from rank to rank.
constexpr bool is_about_others(Code code) noexcept {
  return code == Code::kTimeout || code == Code::kPeerFailed;
}

/// What is made of every rank's words, by rank; see Ranks::decide().
using SumUp = std::function<std::string(const std::vector<std::string>&)>;

/// agree(), with what `sum_up` makes of what `fn` returned on each rank, on one of them, for all; empty where all
/// returned nothing. What it throws is thrown on all ranks. `deadline()` is asked before `fn` and after it.
std::string agree_on(Group& group, const std::function<Deadline()>& deadline, const std::function<std::string()>& fn,
                     const SumUp& sum_up);

}  // namespace shardow::group
