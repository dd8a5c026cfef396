// What the ranks of an Average must have equal: its state, and the values of elements that several of them hold.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "average/counters.h"
#include "shardow/checkpoint.h"
#include "shardow/group.h"

namespace shardow::ema {

/// What else must be equal on all ranks, by name, in words for the message where it is not.
using Facts = std::vector<std::pair<std::string, std::string>>;

/// All that must be equal, of one rank, as it travels.
std::string said(const Facts& facts, const std::string& state = {});

/// Throws kInvalidArgument where ranks have said() other things, naming the first. The same on every rank.
void check_same(std::string_view call, const std::vector<std::string>& by_rank);

/// One rank's part of a round in which ranks compare their states: words for it, their sum, and the state of all ranks.
class StateWords {
 public:
  /// `own`: this rank's Average::state().
  StateWords(std::string_view call, const std::string& own, const Facts& facts);

  const std::string& words() const { return words_; }

  /// On one rank, of all ranks' words. Throws kInvalidArgument where ranks have made other updates.
  std::string sum_up(const std::vector<std::string>& by_rank) const;

  /// `sum`: sum_up()'s, on every rank. Throws kInvalidArgument on every rank where ranks differ in options or facts.
  /// Collective: one more round, where they do.
  std::string state_of_all(Group& group, std::string_view sum, Deadline deadline);

 private:
  const std::string call_;
  average::State state_;
  std::string all_, words_;
};

/// Of a state of all ranks, what a rank goes on from: rank 0 keeps the sums.
std::string own_part(const std::string& state, int rank);

/// What this rank holds in host memory, for a round in which ranks compare what several of them hold: one pass over it.
class Copies {
 public:
  explicit Copies(std::span<const SaveFile> files);

  std::string words() const;  ///< sixteen bytes each of what is held whole and of the rest

  /// On one rank, of all ranks' words: empty where none of those who hold the same whole tensors, or the same parts,
  /// differ in their values.
  static std::string sum_up(const std::vector<std::string>& by_rank);

  /// Where they differ: throws kInvalidArgument on every rank, naming the first tensor. Collective.
  [[noreturn]] void refuse(Group& group, Deadline deadline) const;

 private:
  std::string whole_, rest_;
};

}  // namespace shardow::ema
