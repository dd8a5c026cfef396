// What is said of a round that failed: the same words in every filling of Group.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/error.h"

namespace shardow::comm {

/// Kept apart from the Error that each member throws: copies of an exception share their text, which members would free
/// under each other's eyes.
struct Failure {
  Code code;
  std::string message;
};

inline Failure did_not_come(std::string_view call, const std::vector<int>& ranks) {
  return {Code::kTimeout, fmt::format("{}: rank{} {} did not come before the deadline; every rank must make this call",
                                      call, ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "))};
}

inline Failure is_gone(std::string_view call, int rank) {
  return {Code::kPeerFailed, fmt::format("{}: rank {} is gone", call, rank)};
}

/// `calls` and `ranks` of all members, in their order; nothing where all made the same call.
inline std::optional<Failure> do_not_fit(const std::vector<std::string>& calls, const std::vector<int>& ranks) {
  for (size_t i = 1; i < calls.size(); ++i) {
    if (calls[i] == calls[0]) continue;
    return Failure{Code::kInvalidArgument,
                   fmt::format("rank {} calls {} where rank {} calls {}", ranks[i], calls[i], ranks[0], calls[0])};
  }
  return std::nullopt;
}

}  // namespace shardow::comm
