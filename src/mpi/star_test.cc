// Stars over a network of the test's own, on threads: messages are late, ranks are late, and die before any message.
#include "mpi/star.h"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <random>
#include <thread>

#include "comm/group_fixture.h"

namespace shardow::over_mpi {
namespace {

using Clock = std::chrono::steady_clock;
using comm::expect_fine;
using comm::expect_in_step;
using std::chrono::microseconds;
using std::chrono::milliseconds;

/// Each message takes as long as the seed says; none passes another of the same two ranks.
class Network {
 public:
  Network(int size, uint64_t seed, microseconds longest)
      : size_(size), longest_(longest), draw_(seed), lines_(static_cast<size_t>(size * size)) {}

  int size() const { return size_; }

  void send(int from, int to, std::string bytes) {
    const std::lock_guard lock(mutex_);
    auto& line = lines_[static_cast<size_t>(from * size_ + to)];
    const auto takes = microseconds(std::uniform_int_distribution<int64_t>(0, longest_.count())(draw_));
    line.push_back({std::max(Clock::now() + takes, line.empty() ? Clock::time_point::min() : line.back().first),
                    std::move(bytes)});
  }

  std::optional<Letter> receive(int to) {
    const std::lock_guard lock(mutex_);
    for (int from = 0; from < size_; ++from) {
      auto& line = lines_[static_cast<size_t>(from * size_ + to)];
      if (line.empty() || line.front().first > Clock::now()) continue;
      Letter letter{from, std::move(line.front().second)};
      line.pop_front();
      return letter;
    }
    return std::nullopt;
  }

 private:
  const int size_;
  const microseconds longest_;
  std::mutex mutex_;
  std::mt19937_64 draw_;
  std::vector<std::deque<std::pair<Clock::time_point, std::string>>> lines_;
};

struct Died {};

/// Of a rank that dies when it would send its last-but-`lives`th message, if that is ever.
class NetworkMail final : public Mail {
 public:
  NetworkMail(int rank, std::shared_ptr<Network> network, int lives)
      : rank_(rank), network_(std::move(network)), lives_(lives) {}
  ~NetworkMail() override {
    for (int to = 0; to < size(); ++to) {
      if (to != rank_ && lives_ != 0) network_->send(rank_, to, "");
    }
  }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return network_->size(); }
  void send(int to, std::shared_ptr<const std::string> bytes) override {
    if (lives_ == 0) throw Died();
    if (lives_ > 0) --lives_;
    network_->send(rank_, to, *bytes);
  }
  std::optional<Letter> receive() override { return network_->receive(rank_); }
  bool all_sent() override { return true; }
  void leave_unsent() override {}

 private:
  const int rank_;
  const std::shared_ptr<Network> network_;
  int lives_;  // messages; negative: it lives on
};

/// body(the rank's Group) on a thread for each rank. `victim` has `lives`.
void on_every_rank(int size, uint64_t seed, const std::function<void(Group&)>& body, milliseconds grace = kGrace,
                   int victim = -1, int lives = -1) {
  const auto network = std::make_shared<Network>(size, seed, microseconds(seed % 2 == 0 ? 0 : 1500));
  std::vector<std::unique_ptr<Group>> groups;
  for (int rank = 0; rank < size; ++rank) {
    auto mail = std::make_unique<NetworkMail>(rank, network, rank == victim ? lives : -1);
    groups.push_back(meeting_group(std::make_unique<Star>(std::move(mail), grace)));
  }
  std::vector<std::jthread> ranks;
  for (auto& group : groups) {
    ranks.emplace_back([&] {
      try {
        body(*group);
      } catch (const Died&) {
      }
    });
  }
}

class Stars : public testing::TestWithParam<std::tuple<GroupCheck, int>> {};

TEST_P(Stars, Conform) {
  const auto& check = std::get<0>(GetParam());
  const int size = std::get<1>(GetParam());
  on_every_rank(size, static_cast<uint64_t>(size), [&](Group& group) { expect_fine(check, group); });
}

INSTANTIATE_TEST_SUITE_P(All, Stars, testing::Combine(testing::ValuesIn(group_checks()), testing::Values(1, 2, 4)),
                         [](const auto& test) {
                           return fmt::format("{}_{}", std::get<0>(test.param).name, std::get<1>(test.param));
                         });

/// How a round ended here: what everybody brought, or the code.
std::string outcome_of(const std::function<std::string()>& round) {
  try {
    return round();
  } catch (const Error& error) {
    return fmt::format("code {}", static_cast<int>(error.code()));
  }
}

constexpr int kRounds = 40;

/// Rounds of all kinds by ranks that are late now and then, with deadlines that pass now and then.
std::vector<std::string> wander(Group& group, uint64_t seed) {
  std::mt19937_64 same(seed), own(seed * 1000 + static_cast<uint64_t>(group.rank()));
  const auto draw = [](auto& from, int most) { return static_cast<int>(from() % static_cast<uint64_t>(most + 1)); };
  std::vector<std::string> outcomes;
  for (int round = 0; round < kRounds; ++round) {
    const int kind = draw(same, 2), a = draw(same, group.size() - 1), b = draw(same, group.size() - 1);
    std::this_thread::sleep_for(microseconds(draw(own, 9) == 0 ? 9000 : draw(own, 2000)));
    const Deadline deadline = Clock::now() + microseconds(draw(own, 12000));
    outcomes.push_back(outcome_of([&]() -> std::string {
      if (kind < 2 || a == b) {
        const auto all = group.all_gather(fmt::format("{} of {}", round, group.rank()), deadline);
        return fmt::format("{}", fmt::join(all, ", "));
      }
      if (group.rank() != a && group.rank() != b) return "not in it";
      std::vector<std::byte> bytes(3000, static_cast<std::byte>(group.rank() == a ? round : 0));
      group.rank() == a ? group.send(bytes, b, deadline) : group.recv(bytes, a, deadline);
      return fmt::format("block {}", static_cast<int>(bytes.back()));
    }));
  }
  return outcomes;
}

void expect_alike(const std::vector<std::vector<std::string>>& outcomes, uint64_t seed) {
  for (size_t round = 0; round < static_cast<size_t>(kRounds); ++round) {
    std::string first;
    for (const auto& of_rank : outcomes) {
      if (round >= of_rank.size() || of_rank[round] == "not in it") continue;
      if (first.empty()) first = of_rank[round];
      EXPECT_EQ(of_rank[round], first) << "round " << round << " of seed " << seed;
    }
  }
}

TEST(Star, ARoundEndsAlikeForAllWhoeverIsLate) {
  int complete = 0, failed = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const int size = 2 + static_cast<int>(seed % 4);
    std::vector<std::vector<std::string>> outcomes(static_cast<size_t>(size));
    on_every_rank(size, seed, [&](Group& group) {
      outcomes[static_cast<size_t>(group.rank())] = wander(group, seed);
      expect_in_step(group);  // all are in step
    });
    expect_alike(outcomes, seed);
    for (const std::string& one : outcomes[0]) (one.starts_with("code") ? failed : complete) += 1;
  }
  EXPECT_GT(complete, 20);
  EXPECT_GT(failed, 20);
}

TEST(Star, ARankThatDiesBeforeAnyMessageIsAnErrorWithinTheDeadline) {
  const milliseconds timeout(60);
  for (int victim = 0; victim < 3; ++victim) {
    const milliseconds grace = victim == 0 ? milliseconds(100) : kGrace;
    for (int lives = 0; lives < (victim == 0 ? 11 : 3); ++lives) {
      std::vector<std::vector<std::string>> outcomes(3);
      on_every_rank(
          3, static_cast<uint64_t>(2 * lives),
          [&](Group& group) {
            auto& mine = outcomes[static_cast<size_t>(group.rank())];
            for (int round = 0; round < 3; ++round) {
              const auto began = Clock::now();
              mine.push_back(outcome_of(
                  [&] { return group.all_gather("x", began + timeout).size() == 3 ? "complete" : "short"; }));
              EXPECT_LT(Clock::now() - began, timeout + grace + std::chrono::seconds(2));
            }
          },
          grace, victim, lives);
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == victim) continue;
        const auto& mine = outcomes[static_cast<size_t>(rank)];
        ASSERT_EQ(mine.size(), 3u);
        EXPECT_NE(mine.back(), "complete") << "rank " << victim << " can't have come";
      }
      if (victim != 0) {
        const auto& other = outcomes[victim == 1 ? 2 : 1];
        EXPECT_EQ(outcomes[0], other) << "the keeper tells all survivors alike; rank " << victim << " died after "
                                      << lives;
      }
    }
  }
}

TEST(Star, WhoWaitsInVainIsTold) {
  on_every_rank(3, 1, [](Group& group) {
    if (group.rank() == 0) std::this_thread::sleep_for(milliseconds(300));
    const comm::Caught got =
        comm::caught([&] { group.all_gather("", group.rank() == 2 ? comm::near() : comm::far()); });
    EXPECT_EQ(got.code, Code::kTimeout) << got.message;
    EXPECT_EQ(got.message, "all_gather(): rank 0 did not come before the deadline; every rank must make this call")
        << "one silence, one timeout";
    expect_in_step(group);
  });
}

TEST(Star, AMemberAtItsDeadlineHurriesTheKeeper) {
  on_every_rank(3, 1, [](Group& group) {
    std::byte token{};
    if (group.rank() == 1) group.recv({&token, 1}, 0, comm::far());
    const comm::Caught got =
        comm::caught([&] { group.all_gather("", group.rank() == 2 ? comm::near() : comm::far()); });
    EXPECT_EQ(got.message, "all_gather(): rank 1 did not come before the deadline; every rank must make this call");
    if (group.rank() == 0) group.send({&token, 1}, 1, comm::far());
    expect_in_step(group);
  });
}

}  // namespace
}  // namespace shardow::over_mpi
