// The machines of a simulated run: ranks that die or come late, disks that fail, and mistakes of an engine that there might be (mutants),
// each put where its effect would be seen: in what reaches the disk, or another rank.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "file/disk_model.h"
#include "shardow/group.h"
#include "simulation.h"

namespace shardow::simulated {

enum class Mutant {
  kNone,
  kNoDataFlush,     ///< files are published unflushed
  kNoNameFlush,     ///< directories are never flushed
  kForgetsWrite,    ///< one write in some reports success, and did half
  kHidesError,      ///< a flush that fails is taken for one that did not
  kInPlace,         ///< a rename is a copy over the old file
  kTwoRenames,      ///< an exchange of directories is two renames, as if nothing could come between
  kNoLocks,         ///< every lock is had by everybody: a living save's draft is a leftover
  kEarlyVerdict,    ///< a rank takes its own word for everybody's
  kNoDeadlines,     ///< a rank waits for ever for one that died in silence
  kKeepsLeftovers,  ///< nothing is ever removed
};
constexpr int kNumMutants = 11;

struct Fault {
  enum class Kind {
    kNone,
    kDies,  ///< the rank ends, and the others are told
    kDiesInSilence,
    kLate,         ///< it stands still for up to two timeouts
    kError,        ///< one call of its disk fails
    kGone,         ///< its disk fails from there on
    kFull,         ///< it cannot grow from there on
    kInterrupted,  ///< half of its calls are interrupted, and the others do half of what they are asked
  } kind = Kind::kNone;
  int rank = 0, at = 0;  ///< which of the rank's steps
};

/// What leaves a rank that has died.
struct Died {};

class World {
 public:
  /// `jobs`: so many ranks each; the ranks of all are numbered through.
  World(Simulation& simulation, const std::vector<int>& jobs, const std::filesystem::path& folder, bool can_exchange,
        std::vector<Fault> faults, Mutant mutant, milliseconds timeout);
  ~World();

  /// The rank's fn(group), on its own thread, in its own environment.
  void live(int rank, const std::function<void(Group&)>& fn);

  bool died(int rank) const { return ranks_[static_cast<size_t>(rank)].dead; }
  int ranks() const { return static_cast<int>(ranks_.size()); }
  const testing_disk::Recording& recording() const;

 private:
  class Disk;
  class Ranks;
  struct Rank {
    bool dead = false, gone = false, full = false;
    int steps = 0;
  };

  Rank& here();
  bool step(const char* what, const std::string& on);  ///< false: the disk fails now, with errno
  bool broken(const char* what);

  Simulation& simulation_;
  std::vector<Rank> ranks_;
  std::vector<Fault> faults_;
  const Mutant mutant_;
  const milliseconds timeout_;
  std::unique_ptr<Disk> disk_;
  std::vector<std::unique_ptr<Group>> groups_;
};

}  // namespace shardow::simulated
