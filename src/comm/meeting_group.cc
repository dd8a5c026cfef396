// The Group that a Meeting makes: every operation is a round in which each rank brings bytes, and what is computed from
// them is computed by each rank for itself. A rank brings its call as well, described in full, so that ranks that
// disagree about length, root or operation are told so instead of being served: all of them, since all read the same.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "base/errors.h"
#include "comm/custom_group.h"
#include "comm/verdicts.h"

namespace shardow {
namespace {

using Lane = Meeting::Lane;

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

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void copy_into(std::span<std::byte> bytes, std::string_view from) {
  if (!bytes.empty()) std::memcpy(bytes.data(), from.data(), bytes.size());  // an empty span may have no address
}

/// What a rank brings to a round: its bytes, its call, and the length of that.
class Brought {
 public:
  static std::string pack(std::string_view bytes, std::string_view call) {
    const uint64_t length = call.size();
    std::string packed;
    packed.reserve(bytes.size() + call.size() + sizeof length);
    packed.append(bytes).append(call).append(reinterpret_cast<const char*>(&length), sizeof length);
    return packed;
  }

  explicit Brought(std::string_view packed) {
    uint64_t length = packed.size();  // too long, where nothing is there
    if (packed.size() >= sizeof length) std::memcpy(&length, packed.end() - sizeof length, sizeof length);
    if (packed.size() < sizeof length || length > packed.size() - sizeof length)
      base::fail(Code::kInvalidArgument, "Meeting::meet() returned {} bytes that nobody brought", packed.size());
    packed.remove_suffix(sizeof length);
    call = packed.substr(packed.size() - length);
    bytes = packed.substr(0, packed.size() - length);
  }

  std::string_view call, bytes;
};

class MeetingGroup final : public Group {
 public:
  explicit MeetingGroup(std::unique_ptr<Meeting> meeting)
      : meeting_(std::move(meeting)), all_{Lane::Kind::kAll, std::vector<int>(static_cast<size_t>(meeting_->size()))} {
    std::iota(all_.members.begin(), all_.members.end(), 0);
  }

  int rank() const noexcept override { return meeting_->rank(); }
  int size() const noexcept override { return meeting_->size(); }

  void begin(std::string_view call, std::chrono::milliseconds) override { call_ = fmt::format("{}: ", call); }

  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    const Met met = meet(all_, next("all_gather()"), mine, deadline);
    return {met.bytes.begin(), met.bytes.end()};
  }

  void all_reduce(std::span<uint64_t> values, Op op, Deadline deadline) override {
    const std::string call = next(fmt::format("all_reduce({}, {} values)", op_name(op), values.size()));
    const Met met = meet(all_, call, text_of(std::as_bytes(values)), deadline);
    std::vector<uint64_t> theirs(values.size());
    copy_into(std::as_writable_bytes(values), met.bytes.front());
    for (size_t rank = 1; rank < met.bytes.size(); ++rank) {
      copy_into(std::as_writable_bytes(std::span(theirs)), met.bytes[rank]);
      for (size_t i = 0; i < values.size(); ++i) values[i] = combined(values[i], theirs[i], op);
    }
  }

  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    const std::string call = next(fmt::format("broadcast({} bytes from rank {})", bytes.size(), root));
    const Met met = meet(all_, call, rank() == root ? text_of(bytes) : std::string_view(), deadline);
    // After the round: every rank learns of a wrong root, and none is left waiting.
    if (root < 0 || root >= size()) base::fail(Code::kInvalidArgument, "{} in a group of {}", call, size());
    if (rank() != root) copy_into(bytes, met.bytes[static_cast<size_t>(root)]);
  }

  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    check_peer(to);
    meet({Lane::Kind::kPair, {rank(), to}}, describe(bytes.size(), rank(), to), text_of(bytes), deadline);
  }

  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    check_peer(from);
    copy_into(
        bytes,
        meet({Lane::Kind::kPair, {from, rank()}}, describe(bytes.size(), from, rank()), {}, deadline).bytes.front());
  }

 private:
  struct Met {
    std::shared_ptr<const Meeting::Bytes> brought;
    std::vector<std::string_view> bytes;  // by member
  };

  Met meet(const Lane& lane, const std::string& call, std::string_view bytes, Deadline deadline) {
    Met met{meeting_->meet(lane, {call, Brought::pack(bytes, call)}, deadline), {}};
    std::vector<std::string> calls;
    for (const std::string& one : *met.brought) {
      const Brought brought(one);
      calls.emplace_back(brought.call);
      met.bytes.push_back(brought.bytes);
    }
    if (calls.size() != lane.members.size())
      base::fail(Code::kInvalidArgument, "{}: Meeting::meet() returned what {} of {} members brought", call,
                 calls.size(), lane.members.size());
    if (const auto failure = comm::do_not_fit(calls, lane.members)) throw Error(failure->code, failure->message);
    return met;
  }

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
      base::fail(Code::kInvalidArgument, "rank {} of {} has no block for rank {}, and gets none from it", rank(),
                 size(), peer);
  }

  const std::unique_ptr<Meeting> meeting_;
  Lane all_;
  std::string call_;  // under way, as it stands before a round's operation
};

}  // namespace

std::unique_ptr<Group> meeting_group(std::unique_ptr<Meeting> meeting) {
  return std::make_unique<MeetingGroup>(std::move(meeting));
}

}  // namespace shardow
