// A Group of rounds over a store. Ranks that disagree about length, root or operation all get an error that says so.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "group/rounds.h"
#include "shardow/store.h"

namespace shardow::group {

class StoreGroup : public Ranks {
 public:
  int rank() const noexcept override { return static_cast<int>(meeting_.index); }
  int size() const noexcept override { return static_cast<int>(meeting_.ranks.size()); }
  void begin(std::string_view call, std::chrono::milliseconds timeout) override;
  void begin_together(std::string_view call, std::chrono::milliseconds timeout, std::string_view did) override;
  std::vector<std::string> all_gather(std::string_view own, Deadline deadline) override;
  Met decide(std::string_view own, const Decide& decide, Deadline deadline) override;
  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override;
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override;
  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override;

  /// Ends the next round for all, since this rank was interrupted in `call`.
  void refuse(const std::string& call);

  int64_t rounds() const noexcept { return rounds_.count(); }
  Store& store() noexcept { return *store_; }

 protected:
  StoreGroup(std::unique_ptr<Store>&& store, Meeting meeting)
      : store_(std::move(store)), meeting_(std::move(meeting)), rounds_(meeting_) {}

  const Meeting& meeting() const noexcept { return meeting_; }

 private:
  Call next(const std::string& operation = {});
  Met pass(int from, int to, size_t bytes, std::string_view own, Deadline deadline);

  const std::unique_ptr<Store> store_;
  const Meeting meeting_;
  Rounds rounds_;
  std::map<std::string, Rounds> pairs_;  // of two ranks, by their keys
  Call call_;                            // under way; later rounds of it are called so
};

}  // namespace shardow::group
