// The ranks of one process: every operation is a round in which each brings bytes (rounds.h), and what is computed from them is computed by
// each rank for itself. A call is described in full, so that ranks that disagree about length, root or operation are told so instead of
// being served.
#include <cstring>
#include <numeric>

#include "base/errors.h"
#include "comm/rounds.h"
#include "shardow/group.h"

namespace shardow {
namespace {

using comm::Lane;
using comm::Rounds;

const char* op_name(Group::Op op) {
  switch (op) {
    case Group::Op::kSum: return "sum";
    case Group::Op::kMax: return "max";
    case Group::Op::kXor: break;
  }
  return "xor";
}

uint64_t combined(uint64_t a, uint64_t b, Group::Op op) {
  switch (op) {
    case Group::Op::kSum: return a + b;
    case Group::Op::kMax: return std::max(a, b);
    case Group::Op::kXor: break;
  }
  return a ^ b;
}

std::string copy_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void copy_into(std::span<std::byte> bytes, const std::string& from) {
  if (!bytes.empty()) std::memcpy(bytes.data(), from.data(), bytes.size());  // an empty span may have no address
}

class ThreadGroup final : public Group {
 public:
  ThreadGroup(int rank, int size, std::shared_ptr<Rounds> rounds)
      : rank_(rank), all_{Lane::Kind::kAll, std::vector<int>(static_cast<size_t>(size))}, rounds_(std::move(rounds)) {
    std::iota(all_.members.begin(), all_.members.end(), 0);
  }
  ~ThreadGroup() override { rounds_->leave(rank_); }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(all_.members.size()); }

  void begin(std::string_view call, std::chrono::milliseconds) override { call_ = fmt::format("{}: ", call); }

  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    return *rounds_->meet(rank_, all_, {next("all_gather()"), std::string(mine)}, deadline);
  }

  void all_reduce(std::span<uint64_t> values, Op op, Deadline deadline) override {
    const std::string call = next(fmt::format("all_reduce({}, {} values)", op_name(op), values.size()));
    const auto all = rounds_->meet(rank_, all_, {call, copy_of(std::as_bytes(values))}, deadline);
    std::vector<uint64_t> theirs(values.size());
    copy_into(std::as_writable_bytes(values), all->front());
    for (size_t rank = 1; rank < all->size(); ++rank) {
      copy_into(std::as_writable_bytes(std::span(theirs)), (*all)[rank]);
      for (size_t i = 0; i < values.size(); ++i) values[i] = combined(values[i], theirs[i], op);
    }
  }

  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    const std::string call = next(fmt::format("broadcast({} bytes from rank {})", bytes.size(), root));
    const auto all = rounds_->meet(rank_, all_, {call, rank_ == root ? copy_of(bytes) : std::string()}, deadline);
    // After the round: every rank learns of a wrong root, and none is left waiting.
    if (root < 0 || root >= size()) base::fail(Code::kInvalidArgument, "{} in a group of {}", call, size());
    if (rank_ != root) copy_into(bytes, (*all)[static_cast<size_t>(root)]);
  }

  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    check_peer(to);
    rounds_->meet(rank_, {Lane::Kind::kPair, {rank_, to}}, {describe(bytes.size(), rank_, to), copy_of(bytes)}, deadline);
  }

  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    check_peer(from);
    copy_into(bytes,
              rounds_->meet(rank_, {Lane::Kind::kPair, {from, rank_}}, {describe(bytes.size(), from, rank_), {}}, deadline)->front());
  }

 private:
  /// The round's name: what it does, and for which call.
  std::string next(const std::string& operation) {
    std::string name = call_ + operation;
    constexpr std::string_view kLater = "a later step of ";
    if (!call_.empty() && !call_.starts_with(kLater)) call_.insert(0, kLater);
    return name;
  }

  static std::string describe(size_t bytes, int from, int to) {
    return fmt::format("for {} bytes from rank {} to rank {}", bytes, from, to);
  }

  void check_peer(int peer) const {
    if (peer < 0 || peer >= size() || peer == rank_)
      base::fail(Code::kInvalidArgument, "rank {} of {} has no block for rank {}, and gets none from it", rank_, size(), peer);
  }

  const int rank_;
  Lane all_;
  std::string call_;  // under way, as it stands before a round's operation
  const std::shared_ptr<Rounds> rounds_;
};

}  // namespace

std::vector<std::unique_ptr<Group>> threads(int n) {
  if (n < 1) base::fail(Code::kInvalidArgument, "a group of {} ranks; at least 1 is needed", n);
  const auto rounds = std::make_shared<Rounds>(n);
  std::vector<std::unique_ptr<Group>> groups;
  groups.reserve(static_cast<size_t>(n));
  for (int rank = 0; rank < n; ++rank) groups.push_back(std::make_unique<ThreadGroup>(rank, n, rounds));
  return groups;
}

}  // namespace shardow
