// Ranks that die or sleep in the middle of a program: deaths VICTIM HOW AT. Survivors say how each round ended, and how
// long it took.
//
//   before  the victim kills itself before round AT
//   within  it is killed AT microseconds after it came to round 1, wherever it is then
//   save    the same, where each round is a save of a sharded file, to the path in SHARDOW_PATH
//   sleep   it sleeps past the others' deadline before round AT, and goes on
//   leave   it ends without MPI_Finalize() before round AT
//
// Rounds before that are not to be late, and have time: only waits that are meant to be in vain are short.
#include <sys/time.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "mpi/impatient.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kTimeout = std::chrono::milliseconds(500), kLong = std::chrono::milliseconds(60'000);

bool within(const std::string& how) {
  return how == "within" || how == "save";
}

void trouble(const std::string& how, int at, int round) {
  if (within(how) && round == 1) {
    const itimerval once = {{0, 0}, {0, at + 1}};
    setitimer(ITIMER_REAL, &once, nullptr);  // whose signal ends the process
  }
  if (within(how) || round != at) return;
  if (how == "before") std::raise(SIGKILL);
  if (how == "leave") _exit(0);
  std::this_thread::sleep_for(2 * kTimeout);
}

void save(shardow::Group& group, int round, std::chrono::milliseconds timeout) {
  std::vector<float> mine(100'000, static_cast<float>(round));
  const int64_t begin = int64_t{100'000} * group.rank();
  const auto region = shardow::Region::whole({group.size(), 100'000}).window(begin, begin + 100'000);
  const std::vector<shardow::TensorView> views = {{"w", shardow::DType::kF32, region, mine.data()}};
  shardow::SaveOptions options;
  options.timeout = timeout;
  shardow::save(group, views, std::getenv("SHARDOW_PATH"), options);
}

/// Whether all rounds were complete.
bool take_part(shardow::Group& group, int victim, const std::string& how, int at) {
  bool complete = true;
  const int rounds = how == "sleep" ? 6 : within(how) ? 5 : 4;
  for (int round = 0; round < rounds; ++round) {
    const auto timeout = round < (within(how) ? 1 : at) ? kLong : kTimeout;
    if (group.rank() == victim) trouble(how, at, round);
    const auto began = Clock::now();
    std::string outcome = "complete";
    try {
      how == "save" ? save(group, round, timeout)
                    : static_cast<void>(group.all_gather(std::string(50'000, 'x'), began + timeout));
    } catch (const shardow::Error& error) {
      outcome = error.what();
      complete = false;
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
    std::printf("rank %d round %d after %.1f s: %s\n", group.rank(), round, seconds, outcome.c_str());
    std::fflush(stdout);
  }
  return complete;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 4) return 2;
  const int victim = std::atoi(argv[1]);
  auto group = victim == 0 ? shardow::over_mpi::mpi_with_grace(MPI_COMM_WORLD, std::chrono::seconds(1))
                           : shardow::mpi(MPI_COMM_WORLD);
  if (!take_part(*group, victim, argv[2], std::atoi(argv[3]))) _exit(0);  // MPI_Finalize() might wait for the dead
  group.reset();
  MPI_Finalize();
  return 0;
}
