#include "group/rounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "delegate.h"
#include "findings.h"
#include "group/memory_store.h"
#include "group/wire.h"

namespace shardow::group {
namespace {

using Shelf = MemoryStore::Shelf;

/// An interruption that records whether it was asked to wait.
class TestInterruption final : public Interruption {
 public:
  struct Record {
    bool may_wait;  ///< put_off()
    int put_off = 0;
  };
  explicit TestInterruption(Record& record) : record_(record) {}
  bool put_off() override {
    record_.put_off += 1;
    return record_.may_wait;
  }
  std::exception_ptr exception(const std::string& waited) override {
    return std::make_exception_ptr(std::runtime_error(waited));
  }

 private:
  Record& record_;
};

/// Counts operations, and throws in place of the one that `ends` says, or is interrupted there.
class CountedStore final : public DelegateStore {
 public:
  explicit CountedStore(std::shared_ptr<Shelf> shelf) : store_(std::move(shelf)) {}

  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    return DelegateStore::get(key, is_patient ? far() : deadline);
  }

  int operations = 0, ends = -1;
  TestInterruption::Record* record = nullptr;  ///< it is interrupted, and does not end
  bool is_gone = false;                        ///< from then on
  bool is_patient = false;                     ///< waits for a key whatever the deadline is

 private:
  Store& store() override {
    if (is_gone && operations > ends && ends >= 0) throw Error(Code::kPeerFailed, "gone");
    if (operations++ != ends) return store_;
    if (record != nullptr) throw TestInterruption(*record);
    throw Error(Code::kPeerFailed, "no answer");
  }

  MemoryStore store_;
};

/// Ranks whose ends of the rounds are driven one at a time, or each on a thread.
struct Ranks {
  explicit Ranks(int size, std::shared_ptr<Shelf> on = std::make_shared<Shelf>()) : shelf(std::move(on)) {
    std::vector<int> names(static_cast<size_t>(size));
    for (int i = 0; i < size; ++i) names[static_cast<size_t>(i)] = i;
    for (size_t i = 0; i < names.size(); ++i) {
      stores.push_back(std::make_unique<CountedStore>(shelf));
      rounds.push_back(std::make_unique<Rounds>(Meeting{*stores.back(), "r/", "gone", names, i}));
    }
  }

  void all(const std::function<void(size_t rank, Rounds& rounds)>& body) {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < rounds.size(); ++i) threads.emplace_back([&, i] { body(i, *rounds[i]); });
  }

  void wait_for(const char* key) const {
    while (!MemoryStore(shelf).check(key)) std::this_thread::yield();
  }

  size_t keys() const {
    const base::Lock lock(shelf->mutex);
    return shelf->values.size();
  }

  std::shared_ptr<Shelf> shelf;
  std::vector<std::unique_ptr<CountedStore>> stores;
  std::vector<std::unique_ptr<Rounds>> rounds;
};

std::string number(int64_t value) {
  Sender out;
  out.number(value);
  return out.bytes();
}

const group::Ranks::Decide kJoin = [](const std::vector<std::string>& words) {
  group::Ranks::Decision decision;
  for (const std::string& word : words) {
    decision.common += word + ";";
    decision.each.push_back("for " + word);
  }
  return decision;
};

TEST(Rounds, DecideOnceForAllWhateverTheirNumber) {
  for (const int size : {1, 2, 31, 32, 70}) {
    Ranks ranks(size);
    std::atomic<int> decided = 0;
    const group::Ranks::Decide decide = [&](const std::vector<std::string>& words) {
      ++decided;
      return kJoin(words);
    };
    ranks.all([&](size_t rank, Rounds& rounds) {
      for (int round = 0; round < 3; ++round) {
        const std::string own = std::to_string(rank) + std::string(rank == 1 ? 40000 : 0, 'x');
        const Rounds::Met met = rounds.meet({"call"}, own, &decide, far());
        EXPECT_EQ(met.own, "for " + own);
        EXPECT_TRUE(met.common.starts_with("0;")) << met.common.substr(0, 20);
      }
    });
    EXPECT_EQ(decided, 3);
  }
}

/// And come at once: no rank looks for missing ones, however slow the machine is.
TEST(Rounds, CostARankFourOperationsWhereAllBringTheSame) {
  for (const int size : {2, 31, 70}) {
    Ranks ranks(size);
    for (auto& store : ranks.stores) store->is_patient = true;
    std::vector<int> least(static_cast<size_t>(size), 1000);
    for (int round = 0; round < 10; ++round) {
      ranks.all([&](size_t rank, Rounds& rounds) {
        const int before = ranks.stores[rank]->operations;
        rounds.meet({"c"}, "", nullptr, far());
        least[rank] = std::min(least[rank], ranks.stores[rank]->operations - before);
      });
    }
    EXPECT_LE(*std::max_element(least.begin(), least.end()), size > 31 ? 5 : 4) << size;
    EXPECT_LE(ranks.keys(), 6u) << size;
  }
}

TEST(Rounds, TakeAllWordsAwayWhereNobodyDecides) {
  Ranks ranks(3);
  ranks.all([&](size_t rank, Rounds& rounds) {
    EXPECT_EQ(rounds.meet({"call"}, rank == 2 ? "other" : "same", nullptr, far()).words,
              (std::vector<std::string>{"same", "same", "other"}));
    EXPECT_EQ(rounds.meet({"call"}, "same", nullptr, far()).words, (std::vector<std::string>(3, "same")));
    EXPECT_EQ(rounds.meet({"call"}, "", &kJoin, far()).common, "") << "no rank decides";
    EXPECT_EQ(rounds.meet({std::string(600, 'c')}, "", &kJoin, far()).common, "") << "no rank decides";
  });
}

/// Rank 1 is the last one, and its lane has no words.
TEST(Rounds, WordsOfOtherLanesAreRead) {
  Ranks ranks(32);
  ranks.all([&](size_t rank, Rounds& rounds) {
    if (rank != 2) ranks.wait_for("r/-1/verdict");
    if (rank == 1) ranks.wait_for("r/0/lanes");
    EXPECT_EQ(rounds.meet({"call"}, rank == 0 ? "other" : "same", nullptr, far()).words.at(0), "other");
  });
}

TEST(Rounds, WhatIsThrownWhereWordsAreDecidedIsThrownOnAll) {
  Ranks ranks(3);
  const group::Ranks::Decide refuse = [](const auto&) -> group::Ranks::Decision {
    throw Error(Code::kUnsupported, "no", 7);
  };
  ranks.all([&](size_t, Rounds& rounds) {
    try {
      rounds.meet({"call"}, "words", &refuse, far());
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kUnsupported);
      EXPECT_EQ(error.os_errno(), 7);
      EXPECT_STREQ(error.what(), "no");
    }
    EXPECT_EQ(rounds.meet({"call"}, "a", &kJoin, far()).common, "a;a;a;");
  });
}

/// Ranks 0 and 1 wait for rank 2, which then comes late; the verdict stays.
TEST(Rounds, AVerdictStaysForWhoComesLate) {
  Ranks ranks(3);
  Caught first;
  {
    const std::jthread other([&] { caught([&] { ranks.rounds[1]->meet({"call"}, "one", &kJoin, far()); }); });
    first = caught([&] { ranks.rounds[0]->meet({"call"}, "zero", &kJoin, near()); });
  }
  const Caught late = caught([&] { ranks.rounds[2]->meet({"call"}, "two", &kJoin, far()); });
  EXPECT_EQ(first.code, Code::kTimeout);
  EXPECT_EQ(late.message, first.message);
  for (int round = 0; round < 3; ++round)
    ranks.all([&](size_t, Rounds& rounds) { EXPECT_EQ(rounds.meet({"call"}, "a", &kJoin, far()).common, "a;a;a;"); });
  EXPECT_LE(ranks.keys(), 8u) << "what the failed round left is erased";
}

TEST(Rounds, WhoDiesAsItGivesTheVerdictIsReplacedSoon) {
  const auto began = base::now();
  Ranks ranks(2);
  ranks.stores[1]->ends = 3;  // words are read then
  const std::jthread dies([&] {
    ranks.wait_for("r/0/lane/0");
    EXPECT_EQ(caught([&] { ranks.rounds[1]->meet({"call"}, "b", &kJoin, far()); }).message, "call: no answer");
  });
  EXPECT_EQ(ranks.rounds[0]->meet({"call"}, "a", &kJoin, far()).common, "a;b;");
  EXPECT_LT(base::now() - began, std::chrono::seconds(60)) << "and not at the deadline";
}

/// At each operation of the rank that comes last: the other one gives the verdict in its place, or says that it has
/// left.
TEST(Rounds, WhoDiesAnywhereIsNamedOrReplaced) {
  int replaced = 0, named = 0;
  for (int operation = 0;; ++operation) {
    Ranks ranks(2);
    ranks.stores[1]->ends = operation;
    Caught zero, one;
    {
      const std::jthread dies([&] { one = caught([&] { ranks.rounds[1]->meet({"call"}, "b", &kJoin, far()); }); });
      zero = caught([&] { EXPECT_EQ(ranks.rounds[0]->meet({"call"}, "a", &kJoin, near()).common, "a;b;"); });
    }
    if (ranks.stores[1]->operations <= operation) break;
    EXPECT_EQ(one.message, "call: no answer") << operation;
    (zero.thrown ? named : replaced) += 1;
    EXPECT_TRUE(!zero.thrown || zero.code == Code::kTimeout) << zero.message;
    const auto next = [&](size_t, Rounds& rounds) {  // a round that was good without rank 1 costs all the next one
      const Caught left = caught([&] { rounds.meet({"call"}, "", nullptr, far()); });
      EXPECT_EQ(left.message, zero.thrown ? "" : "rank 1 has left: the ranks' store did not answer it") << operation;
      EXPECT_EQ(rounds.meet({"call"}, "a", &kJoin, far()).common, "a;a;");
    };
    ranks.all(next);
  }
  EXPECT_GE(named, 2);
  EXPECT_GE(replaced, 2);
}

/// At each operation of the rank that comes last. The other one has what it needs, or learns of it at once; both are in
/// step then, but for one round that is ended too where what interrupted could not be put off.
TEST(Rounds, WhoIsInterruptedAnywhereTellsTheOthers) {
  for (const bool may_wait : {true, false}) {
    int good = 0, refused = 0;
    for (int operation = 0;; ++operation) {
      Ranks ranks(2);
      TestInterruption::Record interruption{may_wait};
      ranks.stores[1]->ends = operation;
      ranks.stores[1]->record = &interruption;
      Caught zero;
      std::string waited;
      {
        const std::jthread interrupted([&] {
          ranks.wait_for("r/0/lane/0");
          try {
            EXPECT_EQ(ranks.rounds[1]->meet({"call"}, "b", &kJoin, far()).own, "for b");
          } catch (const std::runtime_error& raised) {
            waited = raised.what();
          }
        });
        zero = caught([&] { EXPECT_EQ(ranks.rounds[0]->meet({"call"}, "a", &kJoin, far()).common, "a;b;"); });
      }
      if (ranks.stores[1]->operations <= operation) break;
      (zero.thrown ? refused : good) += 1;
      EXPECT_EQ(zero.message, zero.thrown ? "rank 1 was interrupted in call" : "") << operation;
      EXPECT_EQ(interruption.put_off, zero.thrown ? 0 : 1) << operation;
      EXPECT_EQ(waited, !zero.thrown && may_wait ? "" : "call") << operation << ": it waited for no other";
      if (!zero.thrown && !may_wait) {
        const Caught next = caught([&] { ranks.rounds[0]->meet({"call"}, "a", &kJoin, far()); });
        EXPECT_EQ(next.message, "rank 1 was interrupted in call") << operation;
      }
      ranks.all([&](size_t, Rounds& rounds) {
        for (int round = 0; round < 3; ++round) EXPECT_EQ(rounds.meet({"call"}, "a", &kJoin, far()).common, "a;a;");
      });
      EXPECT_LE(ranks.keys(), 6u) << operation;
    }
    EXPECT_GE(refused, 2);
    EXPECT_GE(good, 1);
  }
}

/// Returns in what a rank waited that is interrupted when it waits for the verdict.
std::string waited(Ranks& ranks, size_t rank) {
  TestInterruption::Record interruption{true};
  ranks.stores[rank]->ends = 2;
  ranks.stores[rank]->record = &interruption;
  try {
    ranks.rounds[rank]->meet({"call"}, "", nullptr, far());
  } catch (const std::runtime_error& raised) {
    return raised.what();
  }
  return "nothing was thrown";
}

TEST(Rounds, WhoIsInterruptedSaysForWhomItWaited) {
  Ranks ranks(3);
  EXPECT_EQ(waited(ranks, 1), "call: waited for rank(s) [0, 2]");
}

TEST(Rounds, WhoIsInterruptedWhereTheStoreIsGoneLeaves) {
  Ranks ranks(2);
  ranks.stores[0]->is_gone = true;
  EXPECT_EQ(waited(ranks, 0), "call: the ranks' store does not answer");
}

TEST(Rounds, WhoRefusesEndsTheNextRound) {
  Ranks ranks(3);
  const auto agree = [&](size_t, Rounds& rounds) { rounds.meet({"call"}, "", nullptr, far()); };
  ranks.all(agree);
  ranks.rounds[2]->refuse({"call"});
  for (const size_t rank : {size_t{0}, size_t{1}})
    EXPECT_EQ(caught([&] { agree(rank, *ranks.rounds[rank]); }).message, "rank 2 was interrupted in call");
  for (int round = 0; round < 3; ++round) ranks.all(agree);
  EXPECT_EQ(ranks.rounds[2]->count(), 5);
  EXPECT_LE(ranks.keys(), 7u);
}

/// In several lanes; after each failure all are in step again within two rounds.
TEST(Rounds, KeysStayFlatWhateverFails) {
  Ranks ranks(33);
  const group::Ranks::Decide refuse = [](const auto&) -> group::Ranks::Decision {
    throw Error(Code::kUnsupported, "no");
  };
  enum Kind { kInterrupted, kDies, kOtherCall, kLongWords, kRefused, kAbsent, kKinds };
  for (int i = 0; i < 120; ++i) {
    const auto victim = static_cast<size_t>(i * 7 % 33);
    const auto kind = static_cast<Kind>(i % kKinds);
    CountedStore& store = *ranks.stores[victim];
    TestInterruption::Record interruption{i % 4 == 0};
    if (kind == kInterrupted) store.record = &interruption;
    if (kind == kInterrupted || kind == kDies) store.ends = store.operations + i / kKinds % 5;
    if (kind == kAbsent) ranks.rounds[victim]->refuse({"call"});
    ranks.all([&](size_t rank, Rounds& rounds) {
      if (kind == kAbsent && rank == victim) return;
      const std::string words = kind == kLongWords ? std::string(20'000, 'w') : std::to_string(rank);
      const Call call{kind == kOtherCall && rank == victim ? "other" : "call"};
      try {
        rounds.meet(call, words, kind == kRefused ? &refuse : &kJoin, kind == kDies ? near() : far());
      } catch (const std::runtime_error&) {  // an Error, or of an interruption that could not be put off
      }
    });
    store.ends = -1;
    store.record = nullptr;
    // A rank that was interrupted in a round that was good, and could not wait, has ended the next one for all.
    const bool has_ended_next = interruption.put_off > 0 && !interruption.may_wait;
    ranks.all([&](size_t rank, Rounds& rounds) {
      if (!has_ended_next || rank == victim) return;
      EXPECT_TRUE(caught([&] { rounds.meet({"call"}, "", nullptr, far()); }).thrown) << i;
    });
    for (int round = 0; round < 2; ++round)
      ranks.all([](size_t, Rounds& rounds) { caught([&] { rounds.meet({"call"}, "", nullptr, far()); }); });
    ranks.all([](size_t, Rounds& rounds) { rounds.meet({"call"}, "", nullptr, far()); });
    ASSERT_LE(ranks.keys(), 12u) << i;
  }
}

TEST(Rounds, WhoCameAndLeftFailsNobody) {
  Ranks ranks(3);
  ranks.all([&](size_t rank, Rounds& rounds) {
    if (rank != 1) {
      ranks.wait_for("gone");
      EXPECT_EQ(rounds.meet({"call"}, "a", &kJoin, far()).common, "a;b;a;");
    } else {
      const std::jthread leaves([&] {
        ranks.wait_for("r/0/lane/0");
        MemoryStore(ranks.shelf).append("gone", number(1));
      });
      EXPECT_EQ(rounds.meet({"call"}, "b", &kJoin, far()).own, "for b");
    }
  });
}

TEST(Rounds, WhoHasLeftIsNamedToThoseWhoWait) {
  Ranks ranks(3);
  ranks.stores[2]->append("gone", number(2));
  for (const size_t rank : {size_t{0}, size_t{1}}) {
    const Caught got = caught([&] { ranks.rounds[rank]->meet({"call"}, "", nullptr, far()); });
    EXPECT_EQ(got.code, Code::kPeerFailed);
    EXPECT_EQ(got.message, "call: rank 2 is gone");
  }
}

}  // namespace
}  // namespace shardow::group
