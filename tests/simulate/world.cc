#include "world.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <cerrno>

#include "file/environment.h"
#include "late_store.h"

namespace shardow::simulated {
namespace {

thread_local int this_rank = -1;

std::string last(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

}  // namespace

Fault::Kind some_fault(Simulation& seed, bool through_store) {
  if (through_store && seed.chance(2)) return Fault::Kind::kDelayed;
  return static_cast<Fault::Kind>(1 + seed.below(static_cast<int>(Fault::Kind::kInterrupted)));
}

/// The disk as all ranks see it. Each call is a step of its rank.
class World::Disk final : public testing_disk::Recorder {
 public:
  Disk(World& world, const std::filesystem::path& folder, bool can_exchange) : Recorder(folder, can_exchange), world_(world) {}

  bool left_one() const noexcept override { return this_rank >= 0 && world_.here().left > 0; }
  int open(const char* path, int flags, mode_t mode) override {
    if (!fine("open", last(path)) || ((flags & O_CREAT) != 0 && full())) return -1;
    const auto late = [path = std::string(path), flags, mode](Recorder& disk) {
      const int fd = disk.Recorder::open(path.c_str(), flags, mode);
      if (fd >= 0) disk.Recorder::close(fd);
    };
    if (world_.leaves((flags & O_CREAT) != 0 ? Late(late) : Late(), true)) return -1;
    return Recorder::open(path, flags, mode);
  }
  int openat(int directory, const char* name, int flags, mode_t mode) override {
    return fine("openat", name) && !world_.leaves({}, false) ? Recorder::openat(directory, name, flags, mode) : -1;
  }
  int close(int fd) override {
    const bool well = world_.here().dead || fine("close", "");
    const int result = Recorder::close(fd);  // whatever it says, the descriptor is gone
    return well ? result : -1;
  }
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    return fine("pread", "") && !world_.leaves({}, false) ? Recorder::pread(fd, data, some(bytes), offset) : -1;
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    if (!fine("pwrite", fmt::format("{} bytes at {}", bytes, offset)) || full()) return -1;
    if (world_.may_leave()) {
      const auto late = [share = share_of(fd), text = std::string(static_cast<const char*>(data), bytes), offset](Recorder& disk) {
        disk.Recorder::pwrite(share->fd, text.data(), text.size(), offset);
      };
      if (world_.leaves(late, false)) return -1;
    }
    if (world_.mutant() == Mutant::kForgetsWrite && bytes > 1 && world_.simulation_.chance(3))
      return Recorder::pwrite(fd, data, bytes / 2, offset) < 0 ? -1 : static_cast<ssize_t>(bytes);
    return Recorder::pwrite(fd, data, some(bytes), offset);
  }
  int ftruncate(int fd, off_t length) override {
    if (!fine("ftruncate", "") || full()) return -1;
    if (world_.may_leave()) {
      const auto late = [share = share_of(fd), length](Recorder& disk) { disk.Recorder::ftruncate(share->fd, length); };
      if (world_.leaves(late, false)) return -1;
    }
    return Recorder::ftruncate(fd, length);
  }
  int fsync(int fd) override {
    const bool hidden = world_.mutant() == Mutant::kHidesError;
    if (!fine("fsync", "") || world_.leaves({}, false)) return hidden && !world_.here().dead ? 0 : -1;
    struct stat found {};
    ::fstat(fd, &found);
    const size_t before = recording.calls.size();
    if (world_.mutant() == (S_ISDIR(found.st_mode) ? Mutant::kNoNameFlush : Mutant::kNoDataFlush)) return 0;
    const int result = Recorder::fsync(fd);
    if (world_.mutant() == Mutant::kFlushesAfter && !S_ISDIR(found.st_mode) && recording.calls.size() > before) {
      late_.push_back(std::move(recording.calls.back()));
      recording.calls.pop_back();
    }
    return result;
  }
  int rename(const char* from, const char* to) override {
    if (!fine("rename", last(from) + " to " + last(to))) return -1;
    std::string aside = to;
    if (world_.mutant() == Mutant::kMovesToDraft && aside.ends_with("-old.tmp")) aside.replace(aside.size() - 8, 8, ".tmp");
    const auto late = [from = std::string(from), aside](Recorder& disk) { disk.Recorder::rename(from.c_str(), aside.c_str()); };
    if (world_.leaves(late, true)) return -1;
    if (world_.mutant() == Mutant::kInPlace && std::filesystem::is_regular_file(to)) return copy_over(from, to);
    return published(Recorder::rename(from, to));
  }
  int rename_exchange(const char* a, const char* b) override {
    if (!fine("exchange", last(a) + " and " + last(b))) return -1;
    const auto late = [a = std::string(a), b = std::string(b)](Recorder& disk) { disk.Recorder::rename_exchange(a.c_str(), b.c_str()); };
    if (world_.leaves(late, true)) return -1;
    if (world_.mutant() != Mutant::kTwoRenames) return published(Recorder::rename_exchange(a, b));
    const std::string aside = std::string(b) + ".aside";
    if (Recorder::rename(b, aside.c_str()) != 0) return -1;
    if (!fine("exchange", "its second half")) return -1;
    return Recorder::rename(a, b) != 0 ? -1 : Recorder::rename(aside.c_str(), a);
  }
  int mkdir(const char* path, mode_t mode) override {
    if (!fine("mkdir", last(path)) || full()) return -1;
    const auto late = [path = std::string(path), mode](Recorder& disk) { disk.Recorder::mkdir(path.c_str(), mode); };
    return world_.leaves(late, true) ? -1 : Recorder::mkdir(path, mode);
  }
  int link(const char* from, const char* to) override {
    if (!fine("link", last(to))) return -1;
    const auto late = [from = std::string(from), to = std::string(to)](Recorder& disk) { disk.Recorder::link(from.c_str(), to.c_str()); };
    return world_.leaves(late, true) ? -1 : Recorder::link(from, to);
  }
  int unlink(const char* path) override {
    if (world_.mutant() == Mutant::kKeepsLeftovers) return 0;
    const auto late = [path = std::string(path)](Recorder& disk) { disk.Recorder::unlink(path.c_str()); };
    return fine("unlink", last(path)) && !world_.leaves(late, true) ? Recorder::unlink(path) : -1;
  }
  int rmdir(const char* path) override {
    if (world_.mutant() == Mutant::kKeepsLeftovers) return 0;
    const auto late = [path = std::string(path)](Recorder& disk) { disk.Recorder::rmdir(path.c_str()); };
    return fine("rmdir", last(path)) && !world_.leaves(late, true) ? Recorder::rmdir(path) : -1;
  }
  int flock(int fd, int operation) override {
    if (world_.mutant() == Mutant::kNoLocks) return 0;
    if ((operation & LOCK_UN) != 0) return Recorder::flock(fd, operation);  // the kernel does that for the dead, too
    return fine("flock", "") && !world_.leaves({}, false) ? Recorder::flock(fd, operation) : -1;
  }
  int statfs(const char* path, struct statfs* out) override {
    return fine("statfs", last(path)) && !world_.leaves({}, false) ? Recorder::statfs(path, out) : -1;
  }

 private:
  struct Share {
    int fd = -1;
    ~Share() { ::close(fd); }
  };
  std::shared_ptr<Share> share_of(int fd) {
    const auto made = std::make_shared<Share>();
    made->fd = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
    take_for(made->fd, fd);
    return made;
  }

  bool fine(const char* what, const std::string& on) { return world_.step(what, on); }
  bool full() {
    if (!world_.here().full) return false;
    errno = ENOSPC;
    return true;
  }
  size_t some(size_t bytes) { return bytes > 1 && world_.broken("short") ? bytes / 2 : bytes; }

  int copy_over(const char* from, const char* to) {
    std::ifstream file(from, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const int fd = Recorder::open(to, O_WRONLY | O_TRUNC | O_CLOEXEC, 0666);
    const ssize_t done = fine("copy", last(to)) ? Recorder::pwrite(fd, bytes.data(), bytes.size(), 0) : -1;
    Recorder::fsync(fd);
    Recorder::close(fd);
    return done == static_cast<ssize_t>(bytes.size()) ? Recorder::unlink(from) : -1;
  }

  int published(int result) {
    for (auto& flush : std::exchange(late_, {})) recording.calls.push_back(std::move(flush));
    return result;
  }

  World& world_;
  std::vector<testing_disk::Call> late_;  ///< flushes, of kFlushesAfter
};

/// The ranks' Group: each call is a step.
class World::Ranks final : public Group {
 public:
  Ranks(World& world, std::unique_ptr<Group> group) : world_(world), rank_(group->rank()), size_(group->size()), group_(std::move(group)) {}

  bool in_use = false;  ///< by a thread
  void leave() { group_.reset(); }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  void begin(std::string_view call, std::chrono::milliseconds timeout) override {
    if (!group_) throw Died{};
    group_->begin(call, timeout);
  }
  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    come("all_gather");
    if (world_.mutant() == Mutant::kEarlyVerdict && size() > 1 && world_.simulation_.chance(8)) {
      auto all = group_->all_gather(mine, until(deadline));
      all.assign(all.size(), std::string(mine));
      return all;
    }
    return group_->all_gather(mine, until(deadline));
  }
  void all_reduce(std::span<uint64_t> values, Op op, Deadline deadline) override {
    come("all_reduce");
    group_->all_reduce(values, op, until(deadline));
  }
  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    come("broadcast");
    group_->broadcast(bytes, root, until(deadline));
  }
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    come("send");
    group_->send(bytes, to, until(deadline));
  }
  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    come("recv");
    group_->recv(bytes, from, until(deadline));
  }

 private:
  void come(const char* what) { world_.come(what); }
  Deadline until(Deadline deadline) const {
    return world_.mutant() == Mutant::kNoDeadlines ? deadline + std::chrono::hours(100) : deadline;
  }

  World& world_;
  const int rank_, size_;
  std::unique_ptr<Group> group_;
};

World::World(Simulation& simulation, Setting setting)
    : simulation_(simulation), setting_(std::move(setting)), disk_(std::make_unique<Disk>(*this, setting_.folder, setting_.can_exchange)) {
  this_rank = -1;
  late_ = setting_.late;
  for (const int ranks : setting_.jobs) {
    const size_t first = ranks_.size();
    ranks_.resize(first + static_cast<size_t>(ranks));
    for (int lane = 0; lane < setting_.lanes; ++lane) {
      size_t rank = first;
      for (auto& group : groups_of(ranks)) ranks_[rank++].lanes.push_back(std::make_shared<Ranks>(*this, std::move(group)));
    }
  }
}

std::vector<std::unique_ptr<Group>> World::groups_of(int ranks) {
  if (!setting_.through_store) return threads(ranks);
  std::vector<std::unique_ptr<Group>> groups;
  const auto shelf = std::make_shared<Shelf>();
  for (int rank = 0; rank < ranks; ++rank) {
    auto store = std::make_unique<LateStore>(
        simulation_, shelf, [this](const char* what) { return transit(what); }, mutant() == Mutant::kOwnVerdict);
    groups.push_back(store_group(std::move(store), rank, ranks));
  }
  return groups;
}

World::~World() = default;

const testing_disk::Recording& World::recording() const {
  return disk_->recording;
}

void World::live(int rank, const std::function<void(Group&)>& fn, int lane) {
  this_rank = testing_disk::machine = rank;
  const Environment machine{disk_.get()};
  const file::InEnvironment in(&machine);
  Ranks& group = *here().lanes[static_cast<size_t>(lane)];
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

World::Rank& World::here() {
  return ranks_[static_cast<size_t>(this_rank)];
}

bool World::may_leave() {
  return here().stands || here().left > 0;
}

std::vector<Late> World::take_late() {
  return std::exchange(late_, {});
}

/// Whether the rank's disk stands still, with errno: this call is left, the next one may be after a moment, and from then on none is made.
bool World::leaves(const Late& late, bool names) {
  Rank& rank = here();
  if (rank.left == 0 && !std::exchange(rank.stands, false)) return false;
  if (rank.left == 1 && !simulation_.chance(3)) return false;
  if (rank.left < 2 && late) (names ? late_ : late_writes_).push_back(late);
  if (rank.left < 2) {
    simulation_.remember([&] { return fmt::format("rank {}: this is left{}", this_rank, late ? ", and will be done" : ""); });
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
  const bool locked = what == std::string_view("close");  // ranks of one process close files under a lock that they share
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
  simulation_.remember([&] { return fmt::format("rank {}: this takes {} s", this_rank, std::chrono::duration<double>(time).count()); });
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
  const auto interrupted = [&](const Fault& fault) { return fault.kind == Fault::Kind::kInterrupted && fault.rank == this_rank; };
  return kMayBe.find(fmt::format(" {} ", what)) != std::string_view::npos &&
         std::any_of(setting_.faults.begin(), setting_.faults.end(), interrupted) && simulation_.chance(2);
}

}  // namespace shardow::simulated
