// An anonymous file (memfd), which others of the same user open through /proc.
#include "base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/errors.h"
#include "base/files.h"

namespace shardow::base {
namespace {

std::span<std::byte> map(int fd, size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? std::span<std::byte>() : std::span(static_cast<std::byte*>(memory), bytes);
}

}  // namespace

SharedMemory SharedMemory::create(size_t bytes) {
  const int fd = syscalls().memfd_create("shardow", MFD_CLOEXEC);
  if (fd < 0) fail_io(errno, "shared memory", "cannot be made");
  SharedMemory made(fd, {});
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) fail_io(errno, "shared memory", "cannot be given its size");
  made.bytes_ = map(fd, bytes);
  if (made.bytes_.empty()) fail_io(errno, "shared memory", "cannot be mapped");
  return made;
}

std::optional<SharedMemory> SharedMemory::open(const std::string& address, size_t bytes) {
  const int fd = syscalls().open(address.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return std::nullopt;
  SharedMemory found(fd, {});
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size != static_cast<off_t>(bytes))
    return std::nullopt;
  found.bytes_ = map(fd, bytes);
  if (found.bytes_.empty()) return std::nullopt;
  return found;
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), bytes_(std::exchange(other.bytes_, {})) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
  if (fd_ >= 0) ::close(fd_);
}

std::string SharedMemory::address() const {
  return fmt::format("/proc/{}/fd/{}", ::getpid(), fd_);
}

}  // namespace shardow::base
