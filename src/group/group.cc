// The groups of one process and of a store. Every operation of the latter is a round (rounds.h), in which a rank brings
// its call as well, described in full, so that ranks that disagree about length, root or operation all get an error
// that says so.
#include "shardow/group.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "base/errors.h"
#include "group/memory_store.h"
#include "group/rounds.h"
#include "group/store_group.h"
#include "group/wire.h"
#include "shardow/store.h"

namespace shardow {
namespace {

using base::fail;
using group::StoreGroup;

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void copy_into(std::span<std::byte> bytes, std::string_view from) {
  if (!bytes.empty()) std::memcpy(bytes.data(), from.data(), bytes.size());  // an empty span may have no address
}

std::vector<int> numbers(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// A group with a store for it alone, which may have the keys of several, one after the other.
class OwnStoreGroup final : public StoreGroup {
 public:
  OwnStoreGroup(std::unique_ptr<Store> store, const std::string& keys, int rank, int size)
      : StoreGroup(std::move(store), {*store, keys + "all/", keys + "gone", numbers(size), static_cast<size_t>(rank)}) {
  }

  ~OwnStoreGroup() override {
    try {
      group::Sender out;
      out.number(rank());
      store().append(meeting().gone, out.bytes());
    } catch (...) {  // so is the store
    }
  }
};

}  // namespace

namespace group {

void StoreGroup::begin(std::string_view call, std::chrono::milliseconds timeout) {
  call_ = {std::string(call), std::chrono::duration<double>(timeout).count(), true};
}

void StoreGroup::begin_together(std::string_view call, std::chrono::milliseconds timeout, std::string_view did) {
  call_ = {std::string(call), std::chrono::duration<double>(timeout).count(), false, std::string(did)};
}

std::vector<std::string> StoreGroup::all_gather(std::string_view own, Deadline deadline) {
  return rounds_.meet(next("all_gather()"), own, nullptr, deadline).words;
}

Ranks::Met StoreGroup::decide(std::string_view own, const Decide& decide, Deadline deadline) {
  return rounds_.meet(next(), own, &decide, deadline);
}

void StoreGroup::broadcast(std::span<std::byte> bytes, int root, Deadline deadline) {
  const Call call = next(fmt::format("broadcast({} bytes from rank {})", bytes.size(), root));
  const Rounds::Met met = rounds_.meet(call, rank() == root ? text_of(bytes) : std::string_view(), nullptr, deadline);
  // After the round: every rank learns of a wrong root, and none is left waiting.
  if (root < 0 || root >= size()) fail(Code::kInvalidArgument, "{} in a group of {}", call.name, size());
  if (rank() != root) copy_into(bytes, met.words[static_cast<size_t>(root)]);
}

void StoreGroup::send(std::span<const std::byte> bytes, int to, Deadline deadline) {
  pass(rank(), to, bytes.size(), text_of(bytes), deadline);
}

void StoreGroup::recv(std::span<std::byte> bytes, int from, Deadline deadline) {
  copy_into(bytes, pass(from, rank(), bytes.size(), {}, deadline).words.front());
}

/// A round of two ranks, which no other waits for.
Ranks::Met StoreGroup::pass(int from, int to, size_t bytes, std::string_view own, Deadline deadline) {
  const int peer = rank() == from ? to : from;
  if (peer < 0 || peer >= size() || peer == rank())
    fail(Code::kInvalidArgument, "rank {} of {} has no block for rank {}, and gets none from it", rank(), size(), peer);
  Meeting pair = meeting_;
  pair.keys += fmt::format("{}>{}/", from, to);
  pair.ranks = {meeting_.ranks[static_cast<size_t>(from)], meeting_.ranks[static_cast<size_t>(to)]};
  pair.index = rank() == from ? 0 : 1;
  const std::string call = fmt::format("for {} bytes from rank {} to rank {}", bytes, from, to);
  return pairs_.try_emplace(pair.keys, pair).first->second.meet({call}, own, nullptr, deadline);
}

void StoreGroup::refuse(const std::string& call) {
  rounds_.refuse({call});
}

/// The call that was begun, and what it does where messages name that; without one, the operation.
Call StoreGroup::next(const std::string& operation) {
  if (call_.name.empty()) return {operation.empty() ? "agree()" : operation, 0, true};
  Call call = call_;
  if (meeting_.names_call && !operation.empty()) call.name += ": " + operation;
  call_.did.clear();
  if (std::exchange(call_.is_first, false)) call_.name.insert(0, "a later step of ");
  return call;
}

}  // namespace group

std::unique_ptr<Group> store_group(std::unique_ptr<Store> store, int rank, int size) {
  if (rank < 0 || rank >= size) fail(Code::kInvalidArgument, "a group of {} ranks has no rank {}", size, rank);
  const std::string keys = fmt::format("shardow/{}/", store->add(fmt::format("shardow/groups/{}", rank), 1));
  return std::make_unique<OwnStoreGroup>(std::move(store), keys, rank, size);
}

std::vector<std::unique_ptr<Group>> threads(int n) {
  if (n < 1) fail(Code::kInvalidArgument, "a group of {} ranks; at least 1 is needed", n);
  const auto shelf = std::make_shared<group::MemoryStore::Shelf>();
  std::vector<std::unique_ptr<Group>> groups(static_cast<size_t>(n));
  for (int rank = 0; rank < n; ++rank)
    groups[static_cast<size_t>(rank)] = store_group(std::make_unique<group::MemoryStore>(shelf), rank, n);
  return groups;
}

std::unique_ptr<Group> solo() {
  return std::move(threads(1)[0]);
}

}  // namespace shardow
