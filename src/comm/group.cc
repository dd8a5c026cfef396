// The groups of one process and of a store. Every operation of the latter is a round (rounds.h), in which a rank brings
// its call as well, described in full, so that ranks that disagree about length, root or operation all get an error
// that says so.
#include "shardow/group.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "base/errors.h"
#include "comm/memory_store.h"
#include "comm/rounds.h"
#include "comm/wire.h"
#include "shardow/detail/store.h"

namespace shardow {
namespace {

using base::fail;
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

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void copy_into(std::span<std::byte> bytes, std::string_view from) {
  if (!bytes.empty()) std::memcpy(bytes.data(), from.data(), bytes.size());  // an empty span may have no address
}

class StoreGroup final : public Group {
 public:
  StoreGroup(std::unique_ptr<Store> store, int rank, int size)
      : store_(std::move(store)),
        rank_(rank),
        size_(size),
        keys_(fmt::format("shardow/{}/", store_->add(fmt::format("shardow/groups/{}", rank), 1))),
        gone_(keys_ + "gone"),
        all_({*store_, keys_ + "all/", gone_, numbers(size), static_cast<size_t>(rank)}) {}

  ~StoreGroup() override {
    try {
      comm::Sender out;
      out.number(rank_);
      store_->append(gone_, out.bytes());
    } catch (...) {  // so is the store
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  void begin(std::string_view call, std::chrono::milliseconds) override { call_ = fmt::format("{}: ", call); }

  std::vector<std::string> all_gather(std::string_view own, Deadline deadline) override {
    return all_.meet(next("all_gather()"), own, nullptr, deadline).words;
  }

  Answer decide(std::string_view own, const Decide& decide, Deadline deadline) override {
    Rounds::Met met = all_.meet(next("decide()"), own, &decide, deadline);
    return {std::move(met.common), std::move(met.own)};
  }

  void all_reduce(std::span<uint64_t> values, Op op, Deadline deadline) override {
    const auto bytes = std::as_writable_bytes(values);
    const Decide combine = [&](const std::vector<std::string>& words) {
      std::vector<uint64_t> sum(values.size()), other(values.size());
      copy_into(std::as_writable_bytes(std::span(sum)), words.front());
      for (size_t rank = 1; rank < words.size(); ++rank) {
        copy_into(std::as_writable_bytes(std::span(other)), words[rank]);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] = combined(sum[i], other[i], op);
      }
      return Decision{std::string(text_of(std::as_bytes(std::span(sum))))};
    };
    const std::string call = next(fmt::format("all_reduce({}, {} values)", op_name(op), values.size()));
    copy_into(bytes, all_.meet(call, text_of(bytes), &combine, deadline).common);
  }

  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    const std::string call = next(fmt::format("broadcast({} bytes from rank {})", bytes.size(), root));
    const Rounds::Met met = all_.meet(call, rank_ == root ? text_of(bytes) : std::string_view(), nullptr, deadline);
    // After the round: every rank learns of a wrong root, and none is left waiting.
    if (root < 0 || root >= size_) fail(Code::kInvalidArgument, "{} in a group of {}", call, size_);
    if (rank_ != root) copy_into(bytes, met.words[static_cast<size_t>(root)]);
  }

  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    pass(rank_, to, bytes.size(), text_of(bytes), deadline);
  }

  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    copy_into(bytes, pass(from, rank_, bytes.size(), {}, deadline).words.front());
  }

 private:
  static std::vector<int> numbers(int size) {
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  /// A round of two ranks, which no other waits for.
  Rounds::Met pass(int from, int to, size_t bytes, std::string_view own, Deadline deadline) {
    const int peer = rank_ == from ? to : from;
    if (peer < 0 || peer >= size_ || peer == rank_)
      fail(Code::kInvalidArgument, "rank {} of {} has no block for rank {}, and gets none from it", rank_, size_, peer);
    const std::string keys = fmt::format("{}{}>{}/", keys_, from, to);
    const comm::Meeting meeting{*store_, keys, gone_, {from, to}, rank_ == from ? 0u : 1u};
    return pairs_.try_emplace(keys, meeting)
        .first->second.meet(fmt::format("for {} bytes from rank {} to rank {}", bytes, from, to), own, nullptr,
                            deadline);
  }

  /// The round's name: what it does, and for which call.
  std::string next(const std::string& operation) {
    std::string name = call_ + operation;
    constexpr std::string_view kLater = "a later step of ";
    if (!call_.empty() && !call_.starts_with(kLater)) call_.insert(0, kLater);
    return name;
  }

  const std::unique_ptr<Store> store_;
  const int rank_, size_;
  const std::string keys_, gone_;  // gone_: of the ranks that have left
  Rounds all_;
  std::map<std::string, Rounds> pairs_;  // by their keys
  std::string call_;                     // under way, as messages name it before a round's operation
};

}  // namespace

std::unique_ptr<Group> store_group(std::unique_ptr<Store> store, int rank, int size) {
  if (rank < 0 || rank >= size) fail(Code::kInvalidArgument, "a group of {} ranks has no rank {}", size, rank);
  return std::make_unique<StoreGroup>(std::move(store), rank, size);
}

std::vector<std::unique_ptr<Group>> threads(int n) {
  if (n < 1) fail(Code::kInvalidArgument, "a group of {} ranks; at least 1 is needed", n);
  const auto shelf = std::make_shared<comm::MemoryStore::Shelf>();
  std::vector<std::unique_ptr<Group>> groups(static_cast<size_t>(n));
  for (int rank = 0; rank < n; ++rank)
    groups[static_cast<size_t>(rank)] = store_group(std::make_unique<comm::MemoryStore>(shelf), rank, n);
  return groups;
}

std::unique_ptr<Group> solo() {
  return std::move(threads(1)[0]);
}

}  // namespace shardow
