// The groups of one process: of one rank, in which every collective is the identity, and of threads, a Meeting of the
// Rounds that they share (rounds.h).
#include "base/errors.h"
#include "comm/custom_group.h"
#include "comm/rounds.h"
#include "shardow/group.h"

namespace shardow {
namespace {

class ThreadMeeting final : public Meeting {
 public:
  ThreadMeeting(int rank, int size, std::shared_ptr<comm::Rounds> rounds)
      : rank_(rank), size_(size), rounds_(std::move(rounds)) {}
  ~ThreadMeeting() override { rounds_->leave(rank_); }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::shared_ptr<const Bytes> meet(const Lane& lane, Offer offer, Deadline deadline) override {
    return rounds_->meet(rank_, lane, std::move(offer), deadline);
  }

 private:
  const int rank_, size_;
  const std::shared_ptr<comm::Rounds> rounds_;
};

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

std::vector<std::unique_ptr<Group>> threads(int n) {
  if (n < 1) base::fail(Code::kInvalidArgument, "a group of {} ranks; at least 1 is needed", n);
  const auto rounds = std::make_shared<comm::Rounds>(n);
  std::vector<std::unique_ptr<Group>> groups;
  groups.reserve(static_cast<size_t>(n));
  for (int rank = 0; rank < n; ++rank)
    groups.push_back(meeting_group(std::make_unique<ThreadMeeting>(rank, n, rounds)));
  return groups;
}

std::unique_ptr<Group> solo() {
  return std::make_unique<Solo>();
}

}  // namespace shardow
