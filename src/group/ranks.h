// Ranks: what the engine asks of a Group, beyond what users do.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/group.h"

namespace shardow::group {

class Ranks : public Group {
 public:
  struct Decision {
    std::string common;
    std::vector<std::string> each = {};  ///< by rank, or empty
  };
  using Decide = std::function<Decision(const std::vector<std::string>& by_rank)>;
  struct Met {
    std::string common, own;              ///< of what was decided
    std::vector<std::string> words = {};  ///< by rank, where nothing is decided
  };

  /// Returns what `decide` makes, on any rank, of all ranks' `own`, unless all are empty. All throw what it throws.
  virtual Met decide(std::string_view own, const Decide& decide, Deadline deadline) = 0;

  /// begin() of a call that all have begun, so that who is missing in its first round did not forget it. `did`: what
  /// ended this rank's work, if anything, for those who come too late.
  virtual void begin_together(std::string_view call, std::chrono::milliseconds timeout, std::string_view /*did*/) {
    begin(call, timeout);
  }

  virtual void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) = 0;

  /// Both ranks know the length. send() may wait for recv().
  virtual void send(std::span<const std::byte> bytes, int to, Deadline deadline) = 0;
  virtual void recv(std::span<std::byte> bytes, int from, Deadline deadline) = 0;

  virtual bool moves_blocks() const noexcept { return true; }  ///< false: blocks go through a store, which is slow
};

inline Ranks& ranks_of(Group& group) {
  return static_cast<Ranks&>(group);
}

}  // namespace shardow::group
