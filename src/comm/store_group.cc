// Rounds through a store of keys and values. Its waits are the only thing that ranks do together, so a deadline harms
// nobody else:
//
//   1. a member writes its bytes under its own key
//   2. it waits for everybody's, at most until its deadline, and looks now and then whether one that is missing has
//   left
//   3. it proposes what it saw, all there or who is missing; the first proposal is the verdict. Who proposes that
//   somebody is missing writes
//      for them, so that nobody else waits
//   4. all members have everybody's bytes, or throw the same error
//
// A member begins a round when it has ended the one before, so a round that is complete lets the keys of all earlier
// ones be erased.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/turns.h"
#include "comm/custom_group.h"
#include "comm/verdicts.h"

namespace shardow {
namespace {

using base::fail;
using comm::Failure;
using std::chrono::milliseconds;

constexpr const char* kAllThere = "all there";
constexpr size_t kMostBytes = size_t{4} << 20;  // of a value; c10d's TCPStore drops who sends 8 MiB
constexpr milliseconds kFirstLook{50}, kLook{1000};

class StoreMeeting final : public Meeting {
 public:
  StoreMeeting(std::unique_ptr<Store> store, int rank, int size) : store_(std::move(store)), rank_(rank), size_(size) {
    group_ = fmt::format("shardow/{}/", store_->add(fmt::format("shardow/groups/{}", rank)));
  }

  ~StoreMeeting() override {
    try {
      store_->set(gone(rank_), "");
    } catch (...) {  // so is the store
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  std::shared_ptr<const Bytes> meet(const Lane& lane, Offer offer, Deadline deadline) override {
    Kept& kept = lanes_[lane];
    const Round round{lane, fmt::format("{}{}/{}/", group_, name_of(lane), kept.next++), offer.call};
    const std::vector<std::string> before = kept.written;
    write(round.key(rank_), offer.bytes, kept.written);  // (1)
    if (rank_ == lane.members[0]) kept.written.push_back(round.verdict());
    const std::string verdict = decide(round, seen(round, deadline));
    if (verdict != kAllThere) throw Error(static_cast<Code>(verdict[0] - '0'), verdict.substr(1));
    auto bytes = read(round, std::move(offer.bytes));
    for (const std::string& key : before) store_->erase(key);
    kept.written.erase(kept.written.begin(), kept.written.begin() + static_cast<std::ptrdiff_t>(before.size()));
    return bytes;
  }

 private:
  struct Kept {
    int64_t next = 0;                  // round
    std::vector<std::string> written;  // this rank's keys of earlier rounds
  };

  struct Round {
    const Lane& lane;
    const std::string name, call;

    std::string key(int member) const { return fmt::format("{}{}", name, member); }
    std::string verdict() const { return name + "verdict"; }
    std::vector<std::string> keys() const {
      std::vector<std::string> all;
      for (const int member : lane.members) all.push_back(key(member));
      return all;
    }
  };

  static std::string told(const Failure& failure) {
    return static_cast<char>('0' + static_cast<int>(failure.code)) + failure.message;
  }

  static std::string name_of(const Lane& lane) {
    return lane.kind == Lane::Kind::kAll ? "all" : fmt::format("{}>{}", lane.members[0], lane.members[1]);
  }

  std::string gone(int rank) const { return fmt::format("{}gone/{}", group_, rank); }

  /// (2)
  std::string seen(const Round& round, Deadline deadline) {
    const std::vector<std::string> keys = round.keys();
    for (milliseconds look = kFirstLook;; look = std::min(2 * look, kLook)) {
      const auto now = base::now();
      if (store_->wait(keys, std::min(deadline, now + look))) return kAllThere;
      std::vector<int> missing;
      std::copy_if(round.lane.members.begin(), round.lane.members.end(), std::back_inserter(missing),
                   [&](int member) { return !store_->has(round.key(member)); });
      if (missing.empty()) return kAllThere;
      for (const int member : missing) {
        if (store_->has(gone(member))) return told(comm::is_gone(round.call, member));
      }
      if (now + look < deadline) continue;
      return told(comm::did_not_come(round.call, missing));
    }
  }

  /// (3)
  std::string decide(const Round& round, const std::string& proposal) {
    std::string verdict = store_->set_first(round.verdict(), proposal);
    if (verdict == proposal && proposal != kAllThere) {
      for (const std::string& key : round.keys()) store_->set_first(key, "");
    }
    return verdict;
  }

  /// (4); this rank's own bytes need not come back.
  std::shared_ptr<const Bytes> read(const Round& round, std::string own) {
    std::vector<std::string> keys;
    for (const int member : round.lane.members) {
      if (member != rank_) keys.push_back(round.key(member));
    }
    std::vector<std::string> values = keys.empty() ? keys : store_->get(keys);
    for (size_t i = 0; i < keys.size(); ++i) values[i] = whole(keys[i], std::move(values[i]));
    const auto mine =
        std::find(round.lane.members.begin(), round.lane.members.end(), rank_) - round.lane.members.begin();
    values.insert(values.begin() + mine, std::move(own));
    return std::make_shared<Bytes>(std::move(values));
  }

  /// Long values take several keys. The first one, which others wait for, is written last and begins with the length of
  /// it all.
  void write(const std::string& key, const std::string& value, std::vector<std::string>& written) {
    for (size_t at = kMostBytes; at < value.size(); at += kMostBytes) {
      written.push_back(fmt::format("{}/{}", key, at));
      store_->set(written.back(), value.substr(at, kMostBytes));
    }
    written.push_back(key);
    store_->set(key, fmt::format("{}\n{}", value.size(), value.substr(0, kMostBytes)));
  }

  std::string whole(const std::string& key, std::string first) {
    const size_t length = std::stoull(first);
    first.erase(0, first.find('\n') + 1);
    for (size_t at = kMostBytes; at < length; at += kMostBytes)
      first += store_->get({fmt::format("{}/{}", key, at)}).at(0);
    return first;
  }

  const std::unique_ptr<Store> store_;
  const int rank_, size_;
  std::string group_;  // before all keys
  std::map<Lane, Kept> lanes_;
};

}  // namespace

std::unique_ptr<Group> store_group(std::unique_ptr<Store> store, int rank, int size) {
  if (rank < 0 || rank >= size) fail(Code::kInvalidArgument, "a group of {} ranks has no rank {}", size, rank);
  return meeting_group(std::make_unique<StoreMeeting>(std::move(store), rank, size));
}

}  // namespace shardow
