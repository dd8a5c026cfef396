// For tests: a Group that does as another, but for what a test overrides.
#pragma once

#include "shardow/group.h"

namespace shardow {

class Delegate : public Group {
 public:
  explicit Delegate(Group& group) : group_(group) {}

  int rank() const noexcept override { return group_.rank(); }
  int size() const noexcept override { return group_.size(); }
  bool moves_blocks() const noexcept override { return group_.moves_blocks(); }
  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    return group_.all_gather(mine, deadline);
  }
  Answer decide(std::string_view mine, const Decide& decide, Deadline deadline) override {
    return group_.decide(mine, decide, deadline);
  }
  void all_reduce(std::span<uint64_t> values, Op op, Deadline deadline) override {
    group_.all_reduce(values, op, deadline);
  }
  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    group_.broadcast(bytes, root, deadline);
  }
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override { group_.send(bytes, to, deadline); }
  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override { group_.recv(bytes, from, deadline); }

 protected:
  Group& group_;
};

}  // namespace shardow
