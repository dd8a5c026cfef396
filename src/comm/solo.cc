// One rank: every collective is the identity.
#include "base/errors.h"
#include "shardow/group.h"

namespace shardow {
namespace {

class Solo final : public Group {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  std::vector<std::string> all_gather(std::string_view mine, Deadline) override { return {std::string(mine)}; }
  void all_reduce(std::span<uint64_t>, Op, Deadline) override {}
  void broadcast(std::span<std::byte>, int root, Deadline) override {
    if (root != 0) base::fail(Code::kInvalidArgument, "broadcast from rank {} in a group of 1", root);
  }
  void send(std::span<const std::byte>, int to, Deadline) override {
    base::fail(Code::kInvalidArgument, "rank 0 of 1 sends to rank {}", to);
  }
  void recv(std::span<std::byte>, int from, Deadline) override {
    base::fail(Code::kInvalidArgument, "rank 0 of 1 receives from rank {}", from);
  }
};

}  // namespace

std::unique_ptr<Group> solo() {
  return std::make_unique<Solo>();
}

}  // namespace shardow
