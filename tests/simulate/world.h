// The machines of a simulated run: ranks that die or come late, disks that fail, and mistakes of an engine that there
// might be (mutants), each put where its effect would be seen: in what reaches the disk, or another rank.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "seams.h"
#include "shardow/group.h"
#include "simulation.h"
#include "stepped_group.h"

namespace shardow::simulated {

enum class Mutant {
  kNone,
  kNoDataFlush,     ///< files are published unflushed
  kNoNameFlush,     ///< directories are never flushed
  kForgetsWrite,    ///< one write in some reports success, and did half
  kHidesError,      ///< a flush that fails is taken for one that did not
  kInPlace,         ///< a rename is a copy over the old file
  kListsFirst,      ///< what names a directory's files is renamed before they are flushed
  kNoLocks,         ///< every lock is had by everybody: a living save's draft is a leftover
  kEarlyVerdict,    ///< a rank takes its own word for everybody's
  kNoDeadlines,     ///< a rank waits for ever for one that died in silence
  kKeepsLeftovers,  ///< nothing is ever removed
  kFlushesAfter,    ///< a file is published first, and flushed then
  kOwnVerdict,      ///< a rank takes what it saw of the others' messages for the verdict
  kStagesLate,      ///< a save in the background reads the weights, not a copy of them
  kSwapLeaks,       ///< the same, and the next step waits for it: a swap does not
  kReusesMemory,    ///< two saves in the background share the memory of their copies
  kOvertakes,       ///< a save in the background does not wait for the one before it
  kRemovesFirst,    ///< what is replaced is removed before the new one is there
  kNumMutants
};

struct Fault {
  enum class Kind {
    kNone,
    kDies,  ///< the rank ends, and the others are told
    kDiesInSilence,
    kLate,         ///< it stands still for up to two timeouts
    kDelayed,      ///< what it sends next is under way for up to two timeouts; without a store it comes late itself
    kError,        ///< one call of its disk fails
    kGone,         ///< its disk fails from there on
    kFull,         ///< it cannot grow from there on
    kInterrupted,  ///< half of its calls are interrupted, and the others do half of what they are asked
    kStands,  ///< a call of its disk does not return in time, and is done hours later, in the midst of the next save or
              ///< after it
  } kind = Kind::kNone;
  int rank = 0, at = 0;  ///< which of the rank's steps
};

/// Half of them are of messages where those take time.
Fault::Kind some_fault(Simulation& seed, bool through_store);

/// What a call does when the storage goes on that stood still; it owns what it uses.
using Late = std::function<void(testing_disk::Recorder&)>;

struct Setting {
  std::vector<int> jobs;  ///< so many ranks each; the ranks of all are numbered through
  std::filesystem::path folder;
  std::vector<Fault> faults = {};
  Mutant mutant = Mutant::kNone;
  milliseconds timeout{60'000};
  bool through_store = false;   ///< ranks meet through keys and values, whose messages take time
  int lanes = 1;                ///< how many Groups a rank has, each for one thread at a time
  std::vector<Late> late = {};  ///< calls that were left before this world began
};

class World {
 public:
  World(Simulation& simulation, Setting setting);
  ~World();

  /// The rank's fn(group), on its own thread, in its own environment. With another lane, on one more of its threads.
  void live(int rank, const std::function<void(Group&)>& fn, int lane = 0);

  /// Of what a rank does beside its disk and its messages: a step.
  void come(const char* what);

  Group& group(int rank, int lane);
  void leave(int rank);  ///< the others are told, in all lanes of which no thread is in use

  bool died(int rank) const { return ranks_[static_cast<size_t>(rank)].dead; }
  int ranks() const { return static_cast<int>(ranks_.size()); }
  Mutant mutant() const { return setting_.mutant; }
  const testing_disk::Recording& recording() const;

  std::vector<Late>
  take_late();  ///< calls of this world, and of those before, that were left and change names, and are not done yet

 private:
  class Disk;
  struct Rank {
    bool dead = false, gone = false, full = false, late = false, delayed = false;
    bool stands = false;  ///< its next call of the disk does not return
    int steps = 0, left = 0;
    std::vector<std::shared_ptr<SteppedGroup>> lanes = {};
  };

  static bool on_a_rank();  ///< this thread
  Rank& here();
  bool step(const char* what, const std::string& on);  ///< false: the disk fails now, with errno
  bool broken(const char* what);
  bool may_leave();
  bool leaves(const Late& late, bool names);
  void do_late();
  std::chrono::nanoseconds transit(const char* what);
  std::chrono::nanoseconds lateness();
  std::vector<std::unique_ptr<Group>> groups_of(int ranks);
  SteppedGroup::Rank what_befalls();  ///< this rank, at each call of a group

  Simulation& simulation_;
  const Setting setting_;
  std::vector<Rank> ranks_;
  std::unique_ptr<Disk> disk_;
  std::vector<Late> late_,
      late_writes_;  ///< what ranks left, and is to be done yet: changes of names; of what is in a file that is open
};

}  // namespace shardow::simulated
