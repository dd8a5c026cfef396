// A Group of rounds over a store. Ranks that disagree about length, root or operation all get an error that says so.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "group/rounds.h"
#include "shardow/store.h"

namespace shardow::group {

class StoreGroup : public Ranks {
 public:
  int rank() const noexcept override { return static_cast<int>(index_); }
  int size() const noexcept override { return size_; }
  void begin(std::string_view call, std::chrono::milliseconds timeout) override;
  std::vector<std::string> all_gather(std::string_view own, Deadline deadline) override;
  Answer decide(std::string_view own, const Decide& decide, Deadline deadline) override;
  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override;

  /// Ends the next round for all, since this rank was interrupted in `call`.
  void refuse(const std::string& call);

  int64_t rounds() const noexcept { return rounds_.count(); }
  Store& store() noexcept { return *store_; }

 protected:
  StoreGroup(std::unique_ptr<Store>&& store, Meeting meeting)
      : store_(std::move(store)),
        index_(meeting.index),
        size_(static_cast<int>(meeting.ranks.size())),
        names_call_(meeting.names_call),
        rounds_(std::move(meeting)) {}

 private:
  Call next(const std::string& operation);

  const std::unique_ptr<Store> store_;
  const size_t index_;
  const int size_;
  const bool names_call_;
  Rounds rounds_;
  Call call_;  // under way; later rounds of it are called so
};

}  // namespace shardow::group
