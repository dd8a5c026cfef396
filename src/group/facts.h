// Compares within a round what ranks must have equal: facts, by name, and bytes that several ranks hold, by checksum.
// Long lists travel as digests, and where those differ another round names what does.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "shardow/group.h"

namespace shardow::group {

/// One thing that all ranks must have equal, as messages have it.
struct Fact {
  std::string name;  ///< messages end it at its first NUL
  std::string value;
  std::string way_out = {};  ///< ends the message
  /// Not empty: ranks that have facts of this set have the same ones of it, or none that they share by name. The value
  /// is a checksum of bytes.
  std::string set = {};
};
using Facts = std::vector<Fact>;

/// One rank's part of a comparison. What words() throws on one rank, and sum_up(), all throw.
class Compared {
 public:
  virtual ~Compared() = default;

  virtual std::string words() = 0;  ///< this rank's, for a round

  /// On one rank, of all ranks' words: what they come to, empty where all is equal. Throws kInvalidArgument.
  virtual std::string sum_up(const std::vector<std::string>& by_rank) const = 0;

  /// On every rank, of what they came to. Throws the same on all, after another round. Collective.
  virtual void take(Group& group, const std::string& total, std::chrono::milliseconds timeout) = 0;
};

/// Names the first fact that differs, both values and the ranks. The order of facts is no difference.
class EqualFacts final : public Compared {
 public:
  /// `whole`: facts travel as they are, however long, since take() is not called.
  EqualFacts(std::string call, const Facts& facts, bool whole = false);

  std::string words() override { return digests_.empty() ? text_ : digests_; }
  std::string sum_up(const std::vector<std::string>& by_rank) const override;
  void take(Group& group, const std::string& total, std::chrono::milliseconds timeout) override;

 private:
  std::string call_, text_, digests_;
};

}  // namespace shardow::group
