// For tests: a Group and a Store that do as others, but for what a test overrides.
#pragma once

#include <optional>
#include <string>

#include "group/ranks.h"
#include "shardow/store.h"

namespace shardow {

class Delegate : public group::Ranks {
 public:
  explicit Delegate(Group& group) : group_(group::ranks_of(group)) {}

  int rank() const noexcept override { return group_.rank(); }
  int size() const noexcept override { return group_.size(); }
  void begin(std::string_view, std::chrono::milliseconds) override {}
  bool moves_blocks() const noexcept override { return group_.moves_blocks(); }
  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    return group_.all_gather(mine, deadline);
  }
  Met decide(std::string_view mine, const Decide& decide, Deadline deadline) override {
    return group_.decide(mine, decide, deadline);
  }
  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    group_.broadcast(bytes, root, deadline);
  }
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override { group_.send(bytes, to, deadline); }
  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override { group_.recv(bytes, from, deadline); }

 protected:
  group::Ranks& group_;
};

/// A Store that does as another, which is asked for before each call, but for what a test overrides; append() is
/// Store's.
class DelegateStore : public Store {
 public:
  void set(const std::string& key, const std::string& value) override { store().set(key, value); }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    return store().get(key, deadline);
  }
  bool check(const std::string& key) override { return store().check(key); }
  int64_t add(const std::string& key, int64_t amount) override { return store().add(key, amount); }
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    return store().compare_set(key, expected, desired);
  }
  void erase(const std::string& key) override { store().erase(key); }

 protected:
  virtual Store& store() = 0;
};

}  // namespace shardow
