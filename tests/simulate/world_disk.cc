#include "world_disk.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <utility>

namespace shardow::simulated {
namespace {

std::string last(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

/// Names a directory's files.
bool is_list(const std::string& path) {
  return last(path) == file::kIndexName || last(path) == file::kAveragesName;
}

}  // namespace

int World::Disk::open(const char* path, int flags, mode_t mode) {
  if (!fine("open", last(path)) || ((flags & O_CREAT) != 0 && full())) return -1;
  const auto late = [path = std::string(path), flags, mode](Recorder& disk) {
    const int fd = disk.Recorder::open(path.c_str(), flags, mode);
    if (fd >= 0) disk.Recorder::close(fd);
  };
  if (world_.leaves((flags & O_CREAT) != 0 ? Late(late) : Late(), true)) return -1;
  return Recorder::open(path, flags, mode);
}

int World::Disk::openat(int directory, const char* name, int flags, mode_t mode) {
  return fine("openat", name) && !world_.leaves({}, false) ? Recorder::openat(directory, name, flags, mode) : -1;
}

int World::Disk::close(int fd) {
  const bool well = world_.here().dead || fine("close", "");
  const int result = Recorder::close(fd);  // whatever it says, the descriptor is gone
  return well ? result : -1;
}

ssize_t World::Disk::pread(int fd, void* data, size_t bytes, off_t offset) {
  return fine("pread", "") && !world_.leaves({}, false) ? Recorder::pread(fd, data, some(bytes), offset) : -1;
}

ssize_t World::Disk::pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  if (!fine("pwrite", fmt::format("{} bytes at {}", bytes, offset)) || full()) return -1;
  if (world_.may_leave()) {
    const auto late = [share = share_of(fd), text = std::string(static_cast<const char*>(data), bytes),
                       offset](Recorder& disk) { disk.Recorder::pwrite(share->fd, text.data(), text.size(), offset); };
    if (world_.leaves(late, false)) return -1;
  }
  if (world_.mutant() == Mutant::kForgetsWrite && bytes > 1 && world_.simulation_.chance(3))
    return Recorder::pwrite(fd, data, bytes / 2, offset) < 0 ? -1 : static_cast<ssize_t>(bytes);
  return Recorder::pwrite(fd, data, some(bytes), offset);
}

int World::Disk::ftruncate(int fd, off_t length) {
  if (!fine("ftruncate", "") || full()) return -1;
  if (world_.may_leave()) {
    const auto late = [share = share_of(fd), length](Recorder& disk) { disk.Recorder::ftruncate(share->fd, length); };
    if (world_.leaves(late, false)) return -1;
  }
  return Recorder::ftruncate(fd, length);
}

int World::Disk::fsync(int fd) {
  const bool hidden = world_.mutant() == Mutant::kHidesError;
  if (!fine("fsync", "") || world_.leaves({}, false)) return hidden && !world_.here().dead ? 0 : -1;
  struct stat found {};
  ::fstat(fd, &found);
  const size_t before = recording.calls.size();
  if (world_.mutant() == (S_ISDIR(found.st_mode) ? Mutant::kNoNameFlush : Mutant::kNoDataFlush)) return 0;
  const int result = Recorder::fsync(fd);
  const bool after = world_.mutant() == Mutant::kFlushesAfter || world_.mutant() == Mutant::kListsFirst;
  if (after && !S_ISDIR(found.st_mode) && recording.calls.size() > before) {
    late_.push_back(std::move(recording.calls.back()));
    recording.calls.pop_back();
  }
  return result;
}

int World::Disk::rename(const char* from, const char* to) {
  if (!fine("rename", last(from) + " to " + last(to))) return -1;
  const auto late = [from = std::string(from), to = std::string(to)](Recorder& disk) {
    disk.Recorder::rename(from.c_str(), to.c_str());
  };
  if (world_.leaves(late, true)) return -1;
  if (world_.mutant() == Mutant::kInPlace && std::filesystem::is_regular_file(to)) return copy_over(from, to);
  const bool commits = is_list(to);
  if (world_.mutant() == Mutant::kRemovesFirst && commits && !remove_listed(to)) return -1;
  const int result = Recorder::rename(from, to);
  return world_.mutant() == Mutant::kListsFirst && !commits ? result : published(result);
}

bool World::Disk::remove_listed(const std::filesystem::path& list) {
  const auto listing = file::listing_in(list.parent_path(), list.filename().c_str());
  if (!listing) return true;
  for (const auto& [name, file] : listing->files) Recorder::unlink((list.parent_path() / file).c_str());
  return fine("rename", "its second half");
}

int World::Disk::mkdir(const char* path, mode_t mode) {
  if (!fine("mkdir", last(path)) || full()) return -1;
  const auto late = [path = std::string(path), mode](Recorder& disk) { disk.Recorder::mkdir(path.c_str(), mode); };
  return world_.leaves(late, true) ? -1 : Recorder::mkdir(path, mode);
}

int World::Disk::link(const char* from, const char* to) {
  if (!fine("link", last(to))) return -1;
  const auto late = [from = std::string(from), to = std::string(to)](Recorder& disk) {
    disk.Recorder::link(from.c_str(), to.c_str());
  };
  return world_.leaves(late, true) ? -1 : Recorder::link(from, to);
}

int World::Disk::unlink(const char* path) {
  if (world_.mutant() == Mutant::kKeepsLeftovers) return 0;
  const auto late = [path = std::string(path)](Recorder& disk) { disk.Recorder::unlink(path.c_str()); };
  return fine("unlink", last(path)) && !world_.leaves(late, true) ? Recorder::unlink(path) : -1;
}

int World::Disk::rmdir(const char* path) {
  if (world_.mutant() == Mutant::kKeepsLeftovers) return 0;
  const auto late = [path = std::string(path)](Recorder& disk) { disk.Recorder::rmdir(path.c_str()); };
  return fine("rmdir", last(path)) && !world_.leaves(late, true) ? Recorder::rmdir(path) : -1;
}

int World::Disk::flock(int fd, int operation) {
  if (world_.mutant() == Mutant::kNoLocks) return 0;
  if ((operation & LOCK_UN) != 0) return Recorder::flock(fd, operation);  // the kernel does that for the dead, too
  return fine("flock", "") && !world_.leaves({}, false) ? Recorder::flock(fd, operation) : -1;
}

int World::Disk::statfs(const char* path, struct statfs* out) {
  return fine("statfs", last(path)) && !world_.leaves({}, false) ? Recorder::statfs(path, out) : -1;
}

std::shared_ptr<World::Disk::Share> World::Disk::share_of(int fd) {
  const auto made = std::make_shared<Share>();
  made->fd = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  take_for(made->fd, fd);
  return made;
}

bool World::Disk::full() {
  if (!world_.here().full) return false;
  errno = ENOSPC;
  return true;
}

int World::Disk::copy_over(const char* from, const char* to) {
  std::ifstream file(from, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const int fd = Recorder::open(to, O_WRONLY | O_TRUNC | O_CLOEXEC, 0666);
  const ssize_t done = fine("copy", last(to)) ? Recorder::pwrite(fd, bytes.data(), bytes.size(), 0) : -1;
  Recorder::fsync(fd);
  Recorder::close(fd);
  return done == static_cast<ssize_t>(bytes.size()) ? Recorder::unlink(from) : -1;
}

int World::Disk::published(int result) {
  for (auto& flush : std::exchange(late_, {})) recording.calls.push_back(std::move(flush));
  return result;
}

}  // namespace shardow::simulated
