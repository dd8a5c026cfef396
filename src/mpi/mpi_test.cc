// The Group of an MPI communicator. Every rank runs all of these; tests/mpi/mpirun starts them.
#include "shardow/mpi.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <thread>

#include "comm/group_fixture.h"
#include "mpi/calls.h"
#include "shardow/checkpoint.h"

namespace shardow {
namespace {

using comm::caught;
using comm::Caught;
using comm::far;
using comm::near;

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int thread_level() {
  int level = 0;
  MPI_Query_thread(&level);
  return level;
}

class MpiGroups : public testing::TestWithParam<GroupCheck> {};

TEST_P(MpiGroups, Conform) {
  comm::expect_fine(GetParam(), *mpi(MPI_COMM_WORLD));
}

INSTANTIATE_TEST_SUITE_P(All, MpiGroups, testing::ValuesIn(group_checks()),
                         [](const auto& test) { return test.param.name; });

TEST(Mpi, KnowsItsRankAndSize) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto group = mpi(MPI_COMM_WORLD);
  EXPECT_EQ(group->rank(), world_rank());
  EXPECT_EQ(group->size(), size);
  EXPECT_TRUE(group->moves_blocks());
}

TEST(Mpi, CommunicatorsThatAreNoneAreRefused) {
  EXPECT_EQ(caught([] { mpi(MPI_COMM_NULL); }).code, Code::kInvalidArgument);
  MPI_Comm half, between;
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size < 2) return;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank() % 2, 0, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - world_rank() % 2, 7, &between);
  const Caught got = caught([&] { mpi(between); });
  EXPECT_EQ(got.code, Code::kInvalidArgument);
  EXPECT_NE(got.message.find("intercommunicator"), std::string::npos);
  MPI_Comm_free(&between);
  MPI_Comm_free(&half);
}

/// Of lengths that MPI sends at once, and that it sends when the other side is ready.
TEST(Mpi, BlocksOfAnyLengthArriveInOrder) {
  const auto group = mpi(MPI_COMM_WORLD);
  for (const size_t length : {size_t{1}, size_t{4000}, size_t{70'000}, size_t{9} << 20}) {
    for (int shift = 1; shift < group->size(); ++shift) {
      for (int from = 0; from < group->size(); ++from) {
        const int to = (from + shift) % group->size();
        std::vector<std::byte> bytes(length, std::byte(from + 1));
        if (group->rank() == from) group->send(bytes, to, far());
        std::vector<std::byte> received(length);
        if (group->rank() == to) {
          group->recv(received, from, far());
          EXPECT_EQ(received, bytes);
        }
      }
    }
  }
  const auto long_facts = group->all_gather(std::string(200'000, static_cast<char>('a' + group->rank())), far());
  for (int r = 0; r < group->size(); ++r)
    EXPECT_EQ(long_facts[static_cast<size_t>(r)], std::string(200'000, static_cast<char>('a' + r)));
}

/// The program's messages have the tags that ours have, and wait to be received, or take whatever comes.
TEST(Mpi, TheProgramsOwnMessagesAreLeftAlone) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int me = world_rank(), next = (me + 1) % size, last = (me + size - 1) % size;
  constexpr int kTags = 40;
  std::vector<int> sent(kTags), received(kTags, -1);
  std::iota(sent.begin(), sent.end(), me * 100);
  std::vector<MPI_Request> requests(2 * kTags + 1);
  int anything = -1;
  MPI_Irecv(&anything, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &requests[2 * kTags]);
  for (int tag = 0; tag < kTags; ++tag) MPI_Isend(&sent[tag], 1, MPI_INT, next, tag, MPI_COMM_WORLD, &requests[tag]);

  const auto group = mpi(MPI_COMM_WORLD);
  comm::expect_check("all_gather_takes_any_bytes_of_any_length", *group);
  comm::expect_check("blocks_arrive_in_order", *group);
  comm::expect_in_step(*group);

  for (int tag = 1; tag < kTags; ++tag)
    MPI_Irecv(&received[tag], 1, MPI_INT, last, tag, MPI_COMM_WORLD, &requests[kTags + tag]);
  requests[kTags] = MPI_REQUEST_NULL;
  MPI_Waitall(2 * kTags + 1, requests.data(), MPI_STATUSES_IGNORE);
  EXPECT_EQ(anything, last * 100);
  for (int tag = 1; tag < kTags; ++tag) EXPECT_EQ(received[tag], last * 100 + tag);
}

TEST(Mpi, ASubCommunicatorIsAGroupOfItsOwnAndOutlivesItsHandle) {
  const auto all = mpi(MPI_COMM_WORLD);
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank() % 2, -world_rank(), &half);  // in reverse order
  const auto ours = mpi(half);
  MPI_Comm_free(&half);
  const auto ranks = ours->all_gather(std::to_string(world_rank()), far());
  EXPECT_TRUE(std::is_sorted(ranks.rbegin(), ranks.rend()));
  comm::expect_check("blocks_arrive_in_order", *ours);
  comm::expect_in_step(*all);
}

/// What still comes for Groups that are no more does not reach those of a later communicator, which MPI may give the
/// same context.
TEST(Mpi, GroupsAndCommunicatorsComeAndGo) {
  for (int i = 0; i < 200; ++i) {
    MPI_Comm some;
    MPI_Comm_split(MPI_COMM_WORLD, (world_rank() + i) % 3 == 0 ? 1 : 0, 0, &some);
    {
      const auto group = mpi(some), second = mpi(some);
      EXPECT_EQ(second->all_gather(std::to_string(i), far()),
                std::vector<std::string>(static_cast<size_t>(group->size()), std::to_string(i)));
    }
    MPI_Comm_free(&some);
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(Mpi, AGoneRankEndsWaitingAtOnce) {
  for (const int leaving : {1, 0}) {
    for (const comm::WaitingCall& waiting : comm::kWaitingCalls) {
      auto group = mpi(MPI_COMM_WORLD);
      if (group->size() < 2) return;
      if (leaving == 0 && !waiting.of_all) continue;  // it waits for rank 1
      group->rank() == leaving ? group.reset() : comm::expect_gone(waiting, *group, leaving);
    }
  }
}

TEST(Mpi, RanksMayBeSeveralRoundsApartWhoeverIsLate) {
  for (const int late : {0, 1}) {
    const auto group = mpi(MPI_COMM_WORLD), clock = mpi(MPI_COMM_WORLD);
    if (group->size() < 2) return;
    if (group->rank() == late) clock->all_gather("they have given up", far());
    for (int round = 0; round < 3; ++round) {
      const Caught got =
          caught([&] { group->all_gather(std::string(100'000, 'x'), group->rank() == late ? far() : near()); });
      EXPECT_EQ(got.code, Code::kTimeout) << got.message;
    }
    if (group->rank() != late) clock->all_gather("we have", far());
    EXPECT_EQ(group->all_gather("now", far()), std::vector<std::string>(static_cast<size_t>(group->size()), "now"));
  }
}

/// Whoever comes late finds the other's verdict, and the next block is the next one.
TEST(Mpi, ABlockThatOneSideGaveUpIsGivenUpByTheOther) {
  const auto group = mpi(MPI_COMM_WORLD), clock = mpi(MPI_COMM_WORLD);
  for (const int late : {0, 1}) {
    for (const size_t length : {size_t{8}, size_t{1} << 20}) {
      if (group->size() < 2) return;
      std::vector<std::byte> bytes(length, std::byte(group->rank()));
      const auto move = [&](Deadline deadline) {
        group->rank() == 0 ? group->send(bytes, 1, deadline) : group->recv(bytes, 0, deadline);
      };
      if (group->rank() == late) clock->all_gather("the other has given up", far());
      if (group->rank() < 2) {
        EXPECT_EQ(caught([&] { move(group->rank() == late ? far() : near()); }).code, Code::kTimeout);
      }
      if (group->rank() != late) clock->all_gather("we have", far());
      if (group->rank() < 2) move(far());
      EXPECT_EQ(bytes.back(), std::byte(group->rank() == 1 ? 0 : group->rank()));
    }
  }
}

TEST(Mpi, CallsThatDoNotFitAreRefusedOnEveryRank) {
  const auto group = mpi(MPI_COMM_WORLD);
  if (group->size() > 2) return comm::expect_misfits_refused(*group);
  group->begin(group->rank() == 0 ? "save()" : "load()", std::chrono::seconds(1));
  const Caught got = caught([&] { group->all_gather("", far()); });
  EXPECT_EQ(got.message,
            group->size() == 1 ? "" : "rank 1 calls load(): all_gather() where rank 0 calls save(): all_gather()");
}

TEST(Mpi, AnotherThreadNeedsThreadMultiple) {
  const auto group = mpi(MPI_COMM_WORLD);
  Caught got;
  std::jthread([&] {
    got = caught([&] { EXPECT_EQ(group->all_gather("", far()).size(), static_cast<size_t>(group->size())); });
  }).join();
  EXPECT_EQ(got.thrown, thread_level() < MPI_THREAD_MULTIPLE) << got.message;
  if (got.thrown) {
    EXPECT_EQ(got.code, Code::kInvalidArgument);
    EXPECT_NE(got.message.find("MPI_THREAD_MULTIPLE; this program has MPI_THREAD_FUNNELED"), std::string::npos)
        << got.message;
  }
  comm::expect_in_step(*group);
}

/// A sharded file, written and read through the Group; rank r holds row r.
struct Saved {
  Saved(Group& group, const std::string& name, const std::string& suffix)
      : path(std::filesystem::temp_directory_path() /
             (name + "." + group.all_gather(std::to_string(getpid()), far())[0] + suffix)) {
    row.assign(5000, static_cast<float>(group.rank() + 1));
    const Shape shape{group.size(), 5000};
    views = {
        {"w", DType::kF32, Region::whole(shape).window(5000 * group.rank(), 5000 * (group.rank() + 1)), row.data()}};
  }
  std::filesystem::path path;
  std::vector<float> row;
  std::vector<TensorView> views;
};

TEST(Mpi, AFileIsWrittenAndReadByAllRanks) {
  const auto group = mpi(MPI_COMM_WORLD);
  Saved saved(*group, "mpi_test", ".safetensors");
  save(*group, saved.views, saved.path);
  const std::vector<float> was = std::exchange(saved.row, std::vector<float>(5000));
  saved.views[0].data = saved.row.data();
  load(*group, saved.views, saved.path);
  EXPECT_EQ(saved.row, was);
  agree(*group, far(), [] {});
  if (group->rank() == 0) std::filesystem::remove(saved.path);
}

TEST(Mpi, ASaveInTheBackgroundGoesOnBesideTheProgramsMessages) {
  if (thread_level() < MPI_THREAD_MULTIPLE) return;  // the test before this one says what happens then
  const auto group = mpi(MPI_COMM_WORLD), background = mpi(MPI_COMM_WORLD);
  Saved saved(*group, "mpi_test_background", "");
  const std::vector<SaveFile> files{{"a.safetensors", saved.views}};
  StagedSave staged(*background, files, saved.path, {});
  std::vector<std::byte> memory(staged.staging_bytes());
  staged.stage(memory);
  std::fill(saved.row.begin(), saved.row.end(), -1.0f);
  std::jthread writer([&] { staged.write(); });
  for (int step = 0; step < 200; ++step) {
    int sum = 1;
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    ASSERT_EQ(sum, group->size());
    ASSERT_EQ(group->all_gather("x", far()).size(), static_cast<size_t>(group->size()));
  }
  writer.join();
  load(*group, saved.views, saved.path / "a.safetensors");
  EXPECT_EQ(saved.row, std::vector<float>(5000, static_cast<float>(group->rank() + 1)));
  agree(*group, far(), [] {});
  if (group->rank() == 0) std::filesystem::remove_all(saved.path);
}

/// Ranks other than the first say only what failed.
class Quiet : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed())
      std::fprintf(stderr, "rank %d: %s:%d: %s\n", world_rank(), result.file_name(), result.line_number(),
                   result.message());
  }
};

}  // namespace
}  // namespace shardow

// LeakSanitizer's, where it is linked. What MPI_Init() allocates is MPI's own affair, the rest is looked for while Open
// MPI's components are loaded and tests/mpi/leaks.txt can name them. Only the first check looks.
extern "C" {
[[gnu::weak]] void __lsan_disable();
[[gnu::weak]] void __lsan_enable();
[[gnu::weak]] void __lsan_do_leak_check();
}

/// SHARDOW_MULTIPLE: asks for MPI_THREAD_MULTIPLE. A Group outlives MPI_Finalize().
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  EXPECT_EQ(shardow::caught([] { shardow::mpi(MPI_COMM_WORLD); }).code, shardow::Code::kInvalidArgument)
      << "before MPI_Init()";
  int level = 0;
  if (__lsan_disable != nullptr) __lsan_disable();
  MPI_Init_thread(&argc, &argv, std::getenv("SHARDOW_MULTIPLE") != nullptr ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED,
                  &level);
  if (__lsan_enable != nullptr) __lsan_enable();
  if (shardow::world_rank() != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new shardow::Quiet);
  }
  const auto left_over = shardow::mpi(MPI_COMM_WORLD);
  int failed = RUN_ALL_TESTS();
  left_over->all_gather("", shardow::far());
  if (__lsan_do_leak_check != nullptr) __lsan_do_leak_check();
  MPI_Finalize();
  const shardow::Caught got = shardow::caught([&] { left_over->all_gather("", shardow::far()); });
  if (got.message.find("MPI_Finalize() was called") == std::string::npos) failed = 1;
  return failed;
}
