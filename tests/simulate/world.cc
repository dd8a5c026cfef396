#include "world.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <cerrno>

#include "file/environment.h"

namespace shardow::simulated {
namespace {

thread_local int this_rank = -1;

std::string last(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

}  // namespace

/// The disk as all ranks see it. Each call is a step of its rank.
class World::Disk final : public testing_disk::Recorder {
 public:
  Disk(World& world, const std::filesystem::path& folder, bool can_exchange) : Recorder(folder, can_exchange), world_(world) {}

  int open(const char* path, int flags, mode_t mode) override {
    if (!fine("open", last(path)) || ((flags & O_CREAT) != 0 && full())) return -1;
    return Recorder::open(path, flags, mode);
  }
  int openat(int directory, const char* name, int flags, mode_t mode) override {
    return fine("openat", name) ? Recorder::openat(directory, name, flags, mode) : -1;
  }
  int close(int fd) override {
    const bool well = world_.here().dead || fine("close", "");
    const int result = Recorder::close(fd);  // whatever it says, the descriptor is gone
    return well ? result : -1;
  }
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    return fine("pread", "") ? Recorder::pread(fd, data, some(bytes), offset) : -1;
  }
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override {
    if (!fine("pwrite", fmt::format("{} bytes at {}", bytes, offset)) || full()) return -1;
    if (world_.mutant_ == Mutant::kForgetsWrite && bytes > 1 && world_.simulation_.chance(3))
      return Recorder::pwrite(fd, data, bytes / 2, offset) < 0 ? -1 : static_cast<ssize_t>(bytes);
    return Recorder::pwrite(fd, data, some(bytes), offset);
  }
  int ftruncate(int fd, off_t length) override { return fine("ftruncate", "") && !full() ? Recorder::ftruncate(fd, length) : -1; }
  int fsync(int fd) override {
    const bool hidden = world_.mutant_ == Mutant::kHidesError;
    if (!fine("fsync", "")) return hidden && !world_.here().dead ? 0 : -1;
    struct stat found {};
    ::fstat(fd, &found);
    if (world_.mutant_ == (S_ISDIR(found.st_mode) ? Mutant::kNoNameFlush : Mutant::kNoDataFlush)) return 0;
    return Recorder::fsync(fd);
  }
  int rename(const char* from, const char* to) override {
    if (!fine("rename", last(from) + " to " + last(to))) return -1;
    if (world_.mutant_ == Mutant::kInPlace && std::filesystem::is_regular_file(to)) return copy_over(from, to);
    return Recorder::rename(from, to);
  }
  int rename_exchange(const char* a, const char* b) override {
    if (!fine("exchange", last(a) + " and " + last(b))) return -1;
    if (world_.mutant_ != Mutant::kTwoRenames) return Recorder::rename_exchange(a, b);
    const std::string aside = std::string(b) + ".aside";
    if (Recorder::rename(b, aside.c_str()) != 0) return -1;
    if (!fine("exchange", "its second half")) return -1;
    return Recorder::rename(a, b) != 0 ? -1 : Recorder::rename(aside.c_str(), a);
  }
  int mkdir(const char* path, mode_t mode) override { return fine("mkdir", last(path)) && !full() ? Recorder::mkdir(path, mode) : -1; }
  int link(const char* from, const char* to) override { return fine("link", last(to)) ? Recorder::link(from, to) : -1; }
  int unlink(const char* path) override {
    if (world_.mutant_ == Mutant::kKeepsLeftovers) return 0;
    return fine("unlink", last(path)) ? Recorder::unlink(path) : -1;
  }
  int rmdir(const char* path) override {
    if (world_.mutant_ == Mutant::kKeepsLeftovers) return 0;
    return fine("rmdir", last(path)) ? Recorder::rmdir(path) : -1;
  }
  int flock(int fd, int operation) override {
    if (world_.mutant_ == Mutant::kNoLocks) return 0;
    if ((operation & LOCK_UN) != 0) return Recorder::flock(fd, operation);  // the kernel does that for the dead, too
    return fine("flock", "") ? Recorder::flock(fd, operation) : -1;
  }
  int statfs(const char* path, struct statfs* out) override { return fine("statfs", last(path)) ? Recorder::statfs(path, out) : -1; }

 private:
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

  World& world_;
};

/// The ranks' Group: each call is a step.
class World::Ranks final : public Group {
 public:
  Ranks(World& world, Group& group) : world_(world), group_(group) {}

  int rank() const noexcept override { return group_.rank(); }
  int size() const noexcept override { return group_.size(); }
  void begin(std::string_view call, std::chrono::milliseconds timeout) override { group_.begin(call, timeout); }
  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    come("all_gather");
    if (world_.mutant_ == Mutant::kEarlyVerdict && size() > 1 && world_.simulation_.chance(8)) {
      auto all = group_.all_gather(mine, until(deadline));
      all.assign(all.size(), std::string(mine));
      return all;
    }
    return group_.all_gather(mine, until(deadline));
  }
  void all_reduce(std::span<uint64_t> values, Op op, Deadline deadline) override {
    come("all_reduce");
    group_.all_reduce(values, op, until(deadline));
  }
  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    come("broadcast");
    group_.broadcast(bytes, root, until(deadline));
  }
  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    come("send");
    group_.send(bytes, to, until(deadline));
  }
  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    come("recv");
    group_.recv(bytes, from, until(deadline));
  }

 private:
  void come(const char* what) {
    world_.step(what, "");
    if (world_.here().dead) throw Died{};
  }
  Deadline until(Deadline deadline) const { return world_.mutant_ == Mutant::kNoDeadlines ? deadline + std::chrono::hours(100) : deadline; }

  World& world_;
  Group& group_;
};

World::World(Simulation& simulation, const std::vector<int>& jobs, const std::filesystem::path& folder, bool can_exchange,
             std::vector<Fault> faults, Mutant mutant, milliseconds timeout)
    : simulation_(simulation),
      faults_(std::move(faults)),
      mutant_(mutant),
      timeout_(timeout),
      disk_(std::make_unique<Disk>(*this, folder, can_exchange)) {
  for (const int ranks : jobs) {
    for (auto& group : threads(ranks)) groups_.push_back(std::move(group));
  }
  ranks_.resize(groups_.size());
}

World::~World() = default;

const testing_disk::Recording& World::recording() const {
  return disk_->recording;
}

void World::live(int rank, const std::function<void(Group&)>& fn) {
  this_rank = testing_disk::machine = rank;
  const Environment machine{disk_.get()};
  const file::InEnvironment in(&machine);
  Ranks group(*this, *groups_[static_cast<size_t>(rank)]);
  try {
    fn(group);
  } catch (const Died&) {
  }
  const auto told = [&](const Fault& fault) { return fault.rank == rank && fault.kind == Fault::Kind::kDies; };
  if (here().dead && std::any_of(faults_.begin(), faults_.end(), told)) groups_[static_cast<size_t>(rank)].reset();
}

World::Rank& World::here() {
  return ranks_[static_cast<size_t>(this_rank)];
}

bool World::step(const char* what, const std::string& on) {
  Rank& rank = here();
  if (rank.dead) return (errno = EIO, false);
  simulation_.pass();
  simulation_.remember([&] { return fmt::format("rank {}, step {}: {} {}", this_rank, rank.steps, what, on); });
  bool fails = false;
  for (const Fault& fault : faults_) {
    if (fault.rank != this_rank || fault.at != rank.steps) continue;
    using Kind = Fault::Kind;
    simulation_.remember([&] { return fmt::format("rank {}: fault {}", this_rank, static_cast<int>(fault.kind)); });
    rank.dead |= fault.kind == Kind::kDies || fault.kind == Kind::kDiesInSilence;
    rank.gone |= fault.kind == Kind::kGone;
    rank.full |= fault.kind == Kind::kFull;
    fails |= fault.kind == Kind::kError;
    if (fault.kind == Kind::kLate) {
      simulation_.sleep(timeout_ * simulation_.below(200) / 100);
    }
  }
  ++rank.steps;
  if (rank.dead || rank.gone || fails) return (errno = EIO, false);
  if (broken(what)) return (errno = EINTR, false);
  return true;
}

/// For kInterrupted: calls that may be interrupted, and those that may do half.
bool World::broken(const char* what) {
  constexpr std::string_view kMayBe = " open openat pread pwrite ftruncate fsync short ";
  const auto interrupted = [&](const Fault& fault) { return fault.kind == Fault::Kind::kInterrupted && fault.rank == this_rank; };
  return kMayBe.find(fmt::format(" {} ", what)) != std::string_view::npos && std::any_of(faults_.begin(), faults_.end(), interrupted) &&
         simulation_.chance(2);
}

}  // namespace shardow::simulated
