#include "world.h"

#include <fmt/format.h>

#include <cerrno>

#include "late_store.h"
#include "seams.h"
#include "world_disk.h"

namespace shardow::simulated {
namespace {

thread_local int this_rank = -1;

}  // namespace

Fault::Kind some_fault(Simulation& seed, bool through_store) {
  if (through_store && seed.chance(2)) return Fault::Kind::kDelayed;
  return static_cast<Fault::Kind>(1 + seed.below(static_cast<int>(Fault::Kind::kInterrupted)));
}

World::World(Simulation& simulation, Setting setting)
    : simulation_(simulation), setting_(std::move(setting)), disk_(std::make_unique<Disk>(*this, setting_.folder)) {
  this_rank = -1;
  late_ = setting_.late;
  for (const int ranks : setting_.jobs) {
    const size_t first = ranks_.size();
    ranks_.resize(first + static_cast<size_t>(ranks));
    for (int lane = 0; lane < setting_.lanes; ++lane) {
      size_t rank = first;
      for (auto& group : groups_of(ranks))
        ranks_[rank++].lanes.push_back(std::make_shared<SteppedGroup>(std::move(group), what_befalls()));
    }
  }
}

std::vector<std::unique_ptr<Group>> World::groups_of(int ranks) {
  if (!setting_.through_store) return threads(ranks);
  const auto takes = [this](const char* what) { return transit(what); };
  return late_groups(simulation_, takes, mutant() == Mutant::kOwnVerdict, ranks);
}

SteppedGroup::Rank World::what_befalls() {
  const auto takes_own_word = [this] { return mutant() == Mutant::kEarlyVerdict && simulation_.chance(8); };
  return {[this](const char* what) { come(what); }, takes_own_word, mutant() == Mutant::kNoDeadlines};
}

World::~World() = default;

const testing_disk::Recording& World::recording() const {
  return disk_->recording;
}

void World::live(int rank, const std::function<void(Group&)>& fn, int lane) {
  this_rank = testing_disk::machine = rank;
  const OnDisk on_its_disk(disk_.get());
  SteppedGroup& group = *here().lanes[static_cast<size_t>(lane)];
  group.in_use = true;
  try {
    fn(group);
  } catch (const Died&) {
  }
  group.in_use = false;
  const auto told = [&](const Fault& fault) { return fault.rank == rank && fault.kind == Fault::Kind::kDies; };
  if (here().dead && std::any_of(setting_.faults.begin(), setting_.faults.end(), told)) {
    this_rank = -1;
    lane == 0 ? leave(rank) : group.leave();
  }
  this_rank = -1;
}

void World::come(const char* what) {
  step(what, "");
  if (here().dead) throw Died{};
}

Group& World::group(int rank, int lane) {
  return *ranks_[static_cast<size_t>(rank)].lanes[static_cast<size_t>(lane)];
}

void World::leave(int rank) {
  const int before = std::exchange(this_rank, -1);  // takes no time
  for (auto& lane : ranks_[static_cast<size_t>(rank)].lanes) {
    if (!lane->in_use) lane->leave();
  }
  this_rank = before;
}

bool World::on_a_rank() {
  return this_rank >= 0;
}

World::Rank& World::here() {
  return ranks_[static_cast<size_t>(this_rank)];
}

bool World::may_leave() {
  return here().stands || here().left > 0;
}

std::vector<Late> World::take_late() {
  return std::exchange(late_, {});
}

/// Whether the rank's disk stands still, with errno: this call is left, the next one may be after a moment, and from
/// then on none is made.
bool World::leaves(const Late& late, bool names) {
  Rank& rank = here();
  if (rank.left == 0 && !std::exchange(rank.stands, false)) return false;
  if (rank.left == 1 && !simulation_.chance(3)) return false;
  if (rank.left < 2 && late) (names ? late_ : late_writes_).push_back(late);
  if (rank.left < 2) {
    simulation_.remember(
        [&] { return fmt::format("rank {}: this is left{}", this_rank, late ? ", and will be done" : ""); });
    const auto patience = rank.left++ == 0 ? setting_.timeout * 3 / 4 : milliseconds(500);
    simulation_.sleep(patience);
  }
  return (errno = ETIMEDOUT, true);
}

/// At some steps.
void World::do_late() {
  constexpr unsigned kSteps = 40;
  for (std::vector<Late>* const all : {&late_, &late_writes_}) {
    for (size_t i = 0; i < all->size(); ++i) {
      if (!simulation_.chance(kSteps)) continue;
      simulation_.remember([] { return "a call that was left is done"; });
      const Late late = std::move((*all)[i]);
      all->erase(all->begin() + static_cast<std::ptrdiff_t>(i--));
      late(*disk_);
    }
  }
}

bool World::step(const char* what, const std::string& on) {
  Rank& rank = here();
  if (rank.dead) return (errno = EIO, false);
  simulation_.pass();
  simulation_.remember([&] { return fmt::format("rank {}, step {}: {} {}", this_rank, rank.steps, what, on); });
  do_late();
  bool fails = false;
  for (const Fault& fault : setting_.faults) {
    if (fault.rank != this_rank || fault.at != rank.steps) continue;
    using Kind = Fault::Kind;
    simulation_.remember([&] { return fmt::format("rank {}: fault {}", this_rank, static_cast<int>(fault.kind)); });
    rank.dead |= fault.kind == Kind::kDies || fault.kind == Kind::kDiesInSilence;
    rank.gone |= fault.kind == Kind::kGone;
    rank.full |= fault.kind == Kind::kFull;
    fails |= fault.kind == Kind::kError;
    rank.stands |= fault.kind == Kind::kStands;
    rank.delayed |= fault.kind == Kind::kDelayed && setting_.through_store;
    rank.late |= fault.kind == Kind::kLate || (fault.kind == Kind::kDelayed && !setting_.through_store);
  }
  const bool locked =
      what == std::string_view("close");  // ranks of one process close files under a lock that they share
  if (!locked && std::exchange(rank.late, false)) simulation_.sleep(lateness());
  ++rank.steps;
  if (rank.dead || rank.gone || fails) return (errno = EIO, false);
  if (broken(what)) return (errno = EINTR, false);
  return true;
}

/// A message's: of most of them below a millisecond.
std::chrono::nanoseconds World::transit(const char* what) {
  if (this_rank < 0) return {};
  come(what);
  if (!std::exchange(here().delayed, false)) return std::chrono::microseconds(simulation_.below(1000));
  const auto time = lateness();
  simulation_.remember(
      [&] { return fmt::format("rank {}: this takes {} s", this_rank, std::chrono::duration<double>(time).count()); });
  return time;
}

/// Half of them near the deadline, where ranks may see it differently.
std::chrono::nanoseconds World::lateness() {
  if (simulation_.chance(2)) return setting_.timeout * simulation_.below(200) / 100;
  return setting_.timeout + std::chrono::microseconds(simulation_.below(6000) - 3000);
}

/// For kInterrupted: calls that may be interrupted, and those that may do half.
bool World::broken(const char* what) {
  constexpr std::string_view kMayBe = " open openat pread pwrite ftruncate fsync short ";
  const auto interrupted = [&](const Fault& fault) {
    return fault.kind == Fault::Kind::kInterrupted && fault.rank == this_rank;
  };
  return kMayBe.find(fmt::format(" {} ", what)) != std::string_view::npos &&
         std::any_of(setting_.faults.begin(), setting_.faults.end(), interrupted) && simulation_.chance(2);
}

}  // namespace shardow::simulated
