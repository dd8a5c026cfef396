// The Group of simulated ranks: each call is a step of its rank.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "group/ranks.h"

namespace shardow::simulated {

/// What leaves a rank that has died.
struct Died {};

class SteppedGroup final : public group::Ranks {
 public:
  /// What World says of the rank.
  struct Rank {
    std::function<void(const char* what)> come;  ///< throws where the rank has died
    std::function<bool()> takes_own_word;        ///< a mistake: this all_gather() gives the rank's own text for all
    bool has_no_deadlines;                       ///< a mistake
  };

  SteppedGroup(std::unique_ptr<Group> group, Rank world)
      : world_(std::move(world)), rank_(group->rank()), size_(group->size()), group_(std::move(group)) {}

  bool in_use = false;  ///< by a thread
  void leave() { group_.reset(); }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  void begin(std::string_view call, std::chrono::milliseconds timeout) override {
    if (!group_) throw Died{};
    group_->begin(call, timeout);
  }
  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    world_.come("all_gather");
    const bool own_word = size() > 1 && world_.takes_own_word();
    auto all = group_->all_gather(mine, until(deadline));
    if (own_word) all.assign(all.size(), std::string(mine));
    return all;
  }
  Met decide(std::string_view own, const Decide& decide, Deadline deadline) override {
    const std::vector<std::string> by_rank = all_gather(own, deadline);
    if (std::all_of(by_rank.begin(), by_rank.end(), [](const std::string& words) { return words.empty(); })) return {};
    Decision made = decide(by_rank);
    return {std::move(made.common), made.each.empty() ? "" : std::move(made.each.at(static_cast<size_t>(rank_)))};
  }
  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    world_.come("broadcast");
    group::ranks_of(*group_).broadcast(bytes, root, until(deadline));
  }
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    world_.come("send");
    group::ranks_of(*group_).send(bytes, to, until(deadline));
  }
  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    world_.come("recv");
    group::ranks_of(*group_).recv(bytes, from, until(deadline));
  }

 private:
  Deadline until(Deadline deadline) const {
    return world_.has_no_deadlines ? deadline + std::chrono::hours(100) : deadline;
  }

  const Rank world_;
  const int rank_, size_;
  std::unique_ptr<Group> group_;
};

}  // namespace shardow::simulated
