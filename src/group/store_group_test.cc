#include <gtest/gtest.h>

#include <algorithm>
#include <latch>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "delegate.h"
#include "group/group_fixture.h"
#include "group/memory_store.h"
#include "shardow/store.h"

namespace shardow {
namespace {

using group::caught;
using group::far;
using group::Groups;
using group::near;
using group::on_every_rank;

struct Shelf {
  std::shared_ptr<group::MemoryStore::Shelf> values = std::make_shared<group::MemoryStore::Shelf>();
  std::mutex mutex;
  std::vector<std::string> written;  // keys, one after the other
  bool burnt = false;
};

class ShelfStore final : public DelegateStore {
 public:
  explicit ShelfStore(std::shared_ptr<Shelf> shelf) : shelf_(std::move(shelf)), store_(shelf_->values) {}

  void set(const std::string& key, const std::string& value) override {
    DelegateStore::set(key, value);
    const std::lock_guard lock(shelf_->mutex);
    shelf_->written.push_back(key);
  }

 private:
  Store& store() override {
    if (shelf_->burnt) throw Error(Code::kPeerFailed, "the shelf is burnt");
    return store_;
  }

  const std::shared_ptr<Shelf> shelf_;
  group::MemoryStore store_;
};

Groups over(const std::shared_ptr<Shelf>& shelf, int n) {
  Groups groups;
  for (int rank = 0; rank < n; ++rank) groups.add(store_group(std::make_unique<ShelfStore>(shelf), rank, n));
  return groups;
}

class StoreGroups : public testing::TestWithParam<std::tuple<GroupCheck, int>> {};

TEST_P(StoreGroups, Conform) {
  Groups groups = over(std::make_shared<Shelf>(), std::get<1>(GetParam()));
  on_every_rank(groups, [](auto& group) { group::expect_fine(std::get<0>(GetParam()), *group); });
}

INSTANTIATE_TEST_SUITE_P(All, StoreGroups,
                         testing::Combine(testing::ValuesIn(group_checks()), testing::Values(1, 2, 3, 8)),
                         [](const auto& test) {
                           return fmt::format("{}_{}", std::get<0>(test.param).name, std::get<1>(test.param));
                         });

TEST(StoreGroup, KeepsNoMoreKeysThanTwoRoundsHave) {
  const auto shelf = std::make_shared<Shelf>();
  Groups groups = over(shelf, 3);
  on_every_rank(groups, [](auto& group) {
    for (int round = 0; round < 100; ++round) {
      group->all_gather(std::to_string(round), far());
      std::byte token{};
      if (group->rank() == 0) group->send({&token, 1}, 2, far());
      if (group->rank() == 2) group->recv({&token, 1}, 0, far());
    }
  });
  const base::Lock lock(shelf->values->mutex);
  EXPECT_LE(shelf->values->values.size(), 2u * (3 + 1) + 2u * (2 + 1));
}

TEST(StoreGroup, MovesValuesThatAreLongerThanAKeyTakes) {
  Groups groups = over(std::make_shared<Shelf>(), 2);
  on_every_rank(groups, [](auto& group) {
    std::vector<std::byte> bytes((size_t{9} << 20) + 5, std::byte{1});
    if (group->rank() == 1) {
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(i % 251);
    }
    group->broadcast(bytes, 1, far());
    for (size_t i = 0; i < bytes.size(); i += 4093) ASSERT_EQ(bytes[i], std::byte(i % 251)) << i;
  });
}

TEST(StoreGroup, WritesTheKeyThatOthersWaitForLast) {
  const auto shelf = std::make_shared<Shelf>();
  Groups groups = over(shelf, 2);
  on_every_rank(groups, [](auto& group) {
    std::vector<std::byte> bytes(size_t{9} << 20);
    group->broadcast(bytes, 1, far());
  });
  int parts = 0;
  for (auto key = shelf->written.begin(); key != shelf->written.end(); ++key) {
    const auto first = std::find(shelf->written.begin(), shelf->written.end(), key->substr(0, key->rfind('/')));
    if (first == shelf->written.end()) continue;
    ++parts;
    EXPECT_LT(key, first) << *key;
  }
  EXPECT_EQ(parts, 2);
}

TEST(StoreGroup, SeveralOverOneStoreDoNotMeet) {
  const auto shelf = std::make_shared<Shelf>();
  Groups one = over(shelf, 2), other = over(shelf, 2);
  std::jthread first(
      [&] { on_every_rank(one, [](auto& group) { EXPECT_EQ(group->all_gather("one", far())[1], "one"); }); });
  on_every_rank(other, [](auto& group) { EXPECT_EQ(group->all_gather("other", far())[1], "other"); });
}

TEST(StoreGroup, CallsThatDoNotFitAreRefusedOnEveryRank) {
  Groups groups = over(std::make_shared<Shelf>(), 3);
  on_every_rank(groups, [](auto& group) {
    group->begin(group->rank() == 1 ? "save()" : "load()", std::chrono::seconds(1));
    const auto got = caught([&] { group->all_gather("", far()); });
    EXPECT_EQ(got.code, Code::kInvalidArgument);
    EXPECT_NE(got.message.find("calls save()"), std::string::npos) << got.message;
    group->begin("load()", std::chrono::seconds(1));
    EXPECT_EQ(group->all_gather("now", far())[2], "now");
  });
  groups = over(std::make_shared<Shelf>(), 3);
  on_every_rank(groups, [](auto& group) { group::expect_misfits_refused(*group); });
}

TEST(StoreGroup, OneRanksDeadlineEndsTheWaitOfAll) {
  Groups groups = over(std::make_shared<Shelf>(), 3);
  std::latch others_ended(2);
  on_every_rank(groups, [&](auto& group) {
    const Deadline patient = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    if (group->rank() == 2) others_ended.wait();
    const auto got = caught([&] { group->all_gather("", group->rank() == 0 ? near() : patient); });
    if (group->rank() < 2) others_ended.count_down();
    EXPECT_EQ(got.code, Code::kTimeout);
    EXPECT_NE(got.message.find("rank(s) [2]"), std::string::npos) << got.message;
    EXPECT_LT(std::chrono::steady_clock::now(), patient);
  });
}

TEST(StoreGroup, AGoneRankEndsAllWaitingSoon) {
  for (const group::WaitingCall& waiting : group::kWaitingCalls) {
    Groups groups = over(std::make_shared<Shelf>(), 3);
    on_every_rank(groups, [&](auto& group) {
      if (group->rank() == 1) return group.reset();
      for (int again = 0; again < 2; ++again) group::expect_gone(waiting, *group, 1);
    });
  }
}

TEST(StoreGroup, ARankThatIsWrongOrAStoreThatIsGoneIsAnError) {
  const auto shelf = std::make_shared<Shelf>();
  EXPECT_EQ(caught([&] { store_group(std::make_unique<ShelfStore>(shelf), 2, 2); }).code, Code::kInvalidArgument);
  EXPECT_EQ(caught([&] { store_group(std::make_unique<ShelfStore>(shelf), -1, 2); }).code, Code::kInvalidArgument);
  Groups groups = over(shelf, 2);
  shelf->burnt = true;
  EXPECT_EQ(caught([&] { groups[0]->all_gather("", near()); }).message, "all_gather(): the shelf is burnt");
}

}  // namespace
}  // namespace shardow
