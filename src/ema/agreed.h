// What the ranks of an Average must have equal: its state, and the values of elements that several of them hold.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "group/facts.h"
#include "shardow/checkpoint.h"
#include "shardow/group.h"

namespace shardow::ema {

/// The states of an Average as its ranks have them, and facts: what must be equal is compared, what each rank counts
/// for itself is summed.
class EqualStates final : public group::Comparison {
 public:
  /// `own`: this rank's Average::state(). `asked`: what else must be equal.
  EqualStates(std::string call, std::string own, group::Facts asked)
      : call_(std::move(call)), state_(std::move(own)), asked_(std::move(asked)) {}

  std::string words() override;
  std::string sum_up(const std::vector<std::string>& by_rank) const override;  ///< empty where a rank has no words
  void take(group::CollectiveCall& call, const std::string& total) override;

  /// This rank's; once it has taken what all have, with the sums of all.
  const std::string& state() const { return state_; }

 private:
  const std::string call_;
  std::string state_;
  const group::Facts asked_;
  std::optional<group::EqualFacts> facts_;  // once it has words
};

/// Of a state of all ranks, what a rank goes on from: rank 0 keeps the sums.
std::string own_part(const std::string& state, int rank);

/// Checksums of what this rank holds of `files` in host memory; one pass over it. Whole tensors are one set, parts
/// another.
group::Facts copies_in(std::span<const SaveFile> files);

}  // namespace shardow::ema
