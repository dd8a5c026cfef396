// The disk of simulated machines.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "seams.h"
#include "world.h"

namespace shardow::simulated {

/// The disk as all ranks see it. Each call is a step of its rank.
class World::Disk final : public testing_disk::Recorder {
 public:
  Disk(World& world, const std::filesystem::path& folder) : Recorder(folder), world_(world) {}

  bool left_one() const noexcept override { return World::on_a_rank() && world_.here().left > 0; }
  int open(const char* path, int flags, mode_t mode) override;
  int openat(int directory, const char* name, int flags, mode_t mode) override;
  int close(int fd) override;
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override;
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override;
  int ftruncate(int fd, off_t length) override;
  int fsync(int fd) override;
  int rename(const char* from, const char* to) override;
  int mkdir(const char* path, mode_t mode) override;
  int link(const char* from, const char* to) override;
  int unlink(const char* path) override;
  int rmdir(const char* path) override;
  int flock(int fd, int operation) override;
  int statfs(const char* path, struct statfs* out) override;

 private:
  struct Share {
    int fd = -1;
    ~Share() { ::close(fd); }
  };
  std::shared_ptr<Share> share_of(int fd);

  bool fine(const char* what, const std::string& on) { return world_.step(what, on); }
  bool full();
  size_t some(size_t bytes) { return bytes > 1 && world_.broken("short") ? bytes / 2 : bytes; }

  int copy_over(const char* from, const char* to);
  bool remove_listed(const std::filesystem::path& list);
  int published(int result);

  World& world_;
  std::vector<testing_disk::Call> late_;  ///< flushes, of kFlushesAfter and kListsFirst
};

}  // namespace shardow::simulated
