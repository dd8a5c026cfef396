// The Group that a Meeting makes: every operation is a round in which each rank brings bytes, and what is computed from them is computed by
// each rank for itself. A call is described in full, so that ranks that disagree about length, root or operation are told so instead of
// being served.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "base/errors.h"
#include "comm/meeting.h"

namespace shardow::comm {

inline const char* op_name(Group::Op op) {
  switch (op) {
    case Group::Op::kSum: return "sum";
    case Group::Op::kMax: return "max";
    case Group::Op::kXor: break;
  }
  return "xor";
}

inline uint64_t combined(uint64_t a, uint64_t b, Group::Op op) {
  switch (op) {
    case Group::Op::kSum: return a + b;
    case Group::Op::kMax: return std::max(a, b);
    case Group::Op::kXor: break;
  }
  return a ^ b;
}

inline std::string copy_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline void copy_into(std::span<std::byte> bytes, const std::string& from) {
  if (!bytes.empty()) std::memcpy(bytes.data(), from.data(), bytes.size());  // an empty span may have no address
}

class RoundGroup final : public Group {
 public:
  explicit RoundGroup(std::unique_ptr<Meeting> meeting)
      : meeting_(std::move(meeting)), all_{Lane::Kind::kAll, std::vector<int>(static_cast<size_t>(meeting_->size()))} {
    std::iota(all_.members.begin(), all_.members.end(), 0);
  }

  int rank() const noexcept override { return meeting_->rank(); }
  int size() const noexcept override { return meeting_->size(); }

  void begin(std::string_view call, std::chrono::milliseconds) override { call_ = fmt::format("{}: ", call); }

  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    return *meeting_->meet(all_, {next("all_gather()"), std::string(mine)}, deadline);
  }

  void all_reduce(std::span<uint64_t> values, Op op, Deadline deadline) override {
    const std::string call = next(fmt::format("all_reduce({}, {} values)", op_name(op), values.size()));
    const auto all = meeting_->meet(all_, {call, copy_of(std::as_bytes(values))}, deadline);
    std::vector<uint64_t> theirs(values.size());
    copy_into(std::as_writable_bytes(values), all->front());
    for (size_t rank = 1; rank < all->size(); ++rank) {
      copy_into(std::as_writable_bytes(std::span(theirs)), (*all)[rank]);
      for (size_t i = 0; i < values.size(); ++i) values[i] = combined(values[i], theirs[i], op);
    }
  }

  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    const std::string call = next(fmt::format("broadcast({} bytes from rank {})", bytes.size(), root));
    const auto all = meeting_->meet(all_, {call, rank() == root ? copy_of(bytes) : std::string()}, deadline);
    // After the round: every rank learns of a wrong root, and none is left waiting.
    if (root < 0 || root >= size()) base::fail(Code::kInvalidArgument, "{} in a group of {}", call, size());
    if (rank() != root) copy_into(bytes, (*all)[static_cast<size_t>(root)]);
  }

  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    check_peer(to);
    meeting_->meet({Lane::Kind::kPair, {rank(), to}}, {describe(bytes.size(), rank(), to), copy_of(bytes)}, deadline);
  }

  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    check_peer(from);
    copy_into(bytes, meeting_->meet({Lane::Kind::kPair, {from, rank()}}, {describe(bytes.size(), from, rank()), {}}, deadline)->front());
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
    if (peer < 0 || peer >= size() || peer == rank())
      base::fail(Code::kInvalidArgument, "rank {} of {} has no block for rank {}, and gets none from it", rank(), size(), peer);
  }

  const std::unique_ptr<Meeting> meeting_;
  Lane all_;
  std::string call_;  // under way, as it stands before a round's operation
};

}  // namespace shardow::comm
