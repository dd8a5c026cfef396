// Compares within a round what ranks must have equal: facts, by name, and bytes that several ranks hold, by checksum.
// They travel as digests, and where those differ another round names what does.
#pragma once

#include <string>
#include <vector>

#include "group/collective_call.h"

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

/// Names the first fact that differs, both values and the ranks. The order of facts is no difference.
class EqualFacts final : public Comparison {
 public:
  EqualFacts(std::string call, const Facts& facts);

  std::string words() override { return digests_; }
  std::string sum_up(const std::vector<std::string>& by_rank) const override;
  void take(CollectiveCall& call, const std::string& total) override;  ///< a round where anything differs

 private:
  std::string call_, text_, digests_;
};

}  // namespace shardow::group
