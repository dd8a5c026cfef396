#include "base/files.h"

#include <dirent.h>
#include <linux/magic.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/errors.h"

namespace shardow::base {
namespace {

constexpr size_t kMostBytes = size_t{1} << 30;  // per call: Linux moves 0x7ffff000 at most

std::atomic<void (*)()> room_maker{nullptr};
thread_local Syscalls* passed_in = nullptr;

/// Calls `call` until it is not interrupted.
template <class Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

/// And once more where too many files are open.
template <class Call>
int opened(Call call) {
  const int fd = uninterrupted(call);
  return fd < 0 && make_room(errno) ? uninterrupted(call) : fd;
}

int open_or_fail(const Path& path, int flags, const char* what) {
  check_path(path);
  const int fd = opened([&] { return syscalls().open(path.c_str(), flags | O_CLOEXEC, 0666); });
  if (fd < 0) fail_io(errno, path, what);
  return fd;
}

struct stat stat_or_fail(int fd, const Path& path) {
  struct stat found {};
  if (::fstat(fd, &found) != 0) fail_io(errno, path, "cannot stat");
  return found;
}

}  // namespace

Syscalls& syscalls() noexcept {
  static Syscalls machine;
  return passed_in != nullptr ? *passed_in : machine;
}

CallsTo::CallsTo(Syscalls* calls) noexcept : before_(passed_in) {
  if (calls != nullptr) passed_in = calls;
}

CallsTo::~CallsTo() {
  passed_in = before_;
}

int Syscalls::list(const char* path, std::vector<std::string>* names) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(path), &::closedir);
  if (!open) return -1;
  names->clear();
  for (errno = 0;;) {
    const dirent* const entry = ::readdir(open.get());
    if (entry == nullptr) return errno == 0 ? 0 : -1;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names->emplace_back(name);
    errno = 0;  // which asking for memory may have set
  }
}

void fail_io(int error, const Path& path, const char* what) {
  const Code code = error == ENOENT || error == ENOTDIR  ? Code::kNotFound
                    : error == ENOSPC || error == EDQUOT ? Code::kOutOfSpace
                    : error == ENOMEM                    ? Code::kOutOfMemory
                                                         : Code::kIo;
  std::string why = error == ETIMEDOUT ? "the storage stands still and did not answer in time"
                                       : std::generic_category().message(error);
  if (rlimit files{}; error == EMFILE && ::getrlimit(RLIMIT_NOFILE, &files) == 0)
    why += fmt::format("; this process may have {} open: raise that (ulimit -n), or close some", files.rlim_cur);
  throw Error(code, fmt::format("{}: {}: {}", path.string(), what, why), error);
}

void set_room_maker(void (*close_some)()) noexcept {
  room_maker = close_some;
}

bool make_room(int error) noexcept {
  void (*const close_some)() = room_maker;
  if ((error != EMFILE && error != ENFILE) || close_some == nullptr) return false;
  close_some();
  return true;
}

void check_path(const Path& path) {
  if (const size_t at = path.native().find('\0'); at != std::string::npos)
    fail(Code::kInvalidArgument, "'{}' is no path: a NUL follows, behind which nothing would be read",
         path.native().substr(0, at));
}

File File::open(const Path& path) {
  return {path, open_or_fail(path, O_RDONLY | O_NONBLOCK, "cannot open")};
}
File File::open_in(const File& directory, const std::string& name) {
  Path path = directory.path() / name;
  check_path(path);
  const int fd = opened(
      [&] { return directory.calls_->openat(directory.fd_, name.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC, 0); });
  if (fd < 0) fail_io(errno, path, "cannot open");
  File found(std::move(path), fd);
  found.calls_ = directory.calls_;
  return found;
}
File File::open_for_writing(const Path& path) {
  return {path, open_or_fail(path, O_WRONLY, "cannot open for writing")};
}
File File::create(const Path& path) {
  return {path, open_or_fail(path, O_WRONLY | O_CREAT | O_EXCL, "cannot create")};
}

File File::replace(const Path& path) {
  return {path, open_or_fail(path, O_WRONLY | O_CREAT | O_TRUNC, "cannot create")};
}

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), calls_(other.calls_), path_(std::move(other.path_)) {}

File::~File() {
  if (fd_ >= 0) calls_->close(fd_);
}

bool is_of_no_file(int os_errno) noexcept {
  return os_errno == ELOOP || os_errno == ENXIO;
}

bool is_of_no_file(const Error& error) noexcept {
  return error.code() == Code::kInvalidArgument || is_of_no_file(error.os_errno());
}

int64_t File::size() const {
  const struct stat found = stat_or_fail(fd_, path_);
  if (!S_ISREG(found.st_mode)) fail(Code::kInvalidArgument, "{} is not a regular file", path_.string());
  return found.st_size;
}

Identity File::identity() const {
  const struct stat found = stat_or_fail(fd_, path_);
  return {found.st_dev, found.st_ino, found.st_size, found.st_mtim.tv_sec * 1'000'000'000 + found.st_mtim.tv_nsec};
}

bool File::is_directory() const {
  return S_ISDIR(stat_or_fail(fd_, path_).st_mode);
}

void File::read(std::span<std::byte> data, int64_t offset) const {
  while (!data.empty()) {
    const size_t most = std::min(data.size(), kMostBytes);
    const ssize_t done = uninterrupted([&] { return calls_->pread(fd_, data.data(), most, offset); });
    if (done < 0) fail_io(errno, path_, "cannot read");
    if (done == 0)
      fail(Code::kCorrupt, "{} ends at byte {}, {} bytes short: it became shorter while it was read", path_.string(),
           offset, data.size());
    data = data.subspan(static_cast<size_t>(done));
    offset += done;
  }
}

std::string File::text() const {
  std::string text(static_cast<size_t>(size()), '\0');
  read(std::as_writable_bytes(std::span(text)), 0);
  return text;
}

void File::write(std::span<const std::byte> data, int64_t offset) {
  while (!data.empty()) {
    const size_t most = std::min(data.size(), kMostBytes);
    const ssize_t done = uninterrupted([&] { return calls_->pwrite(fd_, data.data(), most, offset); });
    if (done < 0) fail_io(errno, path_, "cannot write");
    if (done == 0) fail_io(EIO, path_, "nothing was written");
    data = data.subspan(static_cast<size_t>(done));
    offset += done;
  }
}

/// What goes wrong, sync() finds out again.
void File::begin_writing(int64_t offset, int64_t bytes) noexcept {
  calls_->sync_file_range(fd_, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void File::set_size(int64_t bytes) {
  if (uninterrupted([&] { return calls_->ftruncate(fd_, bytes); }) != 0) fail_io(errno, path_, "cannot set its size");
}

void File::sync() {
  if (uninterrupted([&] { return calls_->fsync(fd_); }) != 0) fail_io(errno, path_, "cannot flush");
}

/// Not repeated after EINTR: on Linux the descriptor is gone by then.
void File::close() {
  const int fd = std::exchange(fd_, -1);
  if (fd >= 0 && calls_->close(fd) != 0 && errno != EINTR) fail_io(errno, path_, "cannot close");
}

void rename(const Path& from, const Path& to) {
  if (syscalls().rename(from.c_str(), to.c_str()) != 0) fail_io(errno, to, "cannot be put in place");
}

void sync(const Path& path) {
  File file = File::open(path);
  file.sync();
  file.close();
}

Space space_at(const Path& directory) {
  struct statfs found {};
  if (syscalls().statfs(directory.c_str(), &found) != 0) fail_io(errno, directory, "cannot ask for its free space");
  const bool counted = found.f_blocks != 0;  // mounts of object stores may say 0
  constexpr uint32_t kFuse = 0x65735546;     // FUSE_SUPER_MAGIC, which kernel headers before 5.12 lack
  constexpr uint32_t kLocal[] = {
      EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC,       BTRFS_SUPER_MAGIC, TMPFS_MAGIC, RAMFS_MAGIC,
      F2FS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, 0x2fc12fc1,        0xca451a4e};  // the last two: ZFS, bcachefs
  const bool local =
      std::find(std::begin(kLocal), std::end(kLocal), static_cast<uint32_t>(found.f_type)) != std::end(kLocal);
  return {counted ? static_cast<int64_t>(found.f_bavail) * static_cast<int64_t>(found.f_bsize)
                  : std::numeric_limits<int64_t>::max(),
          static_cast<uint32_t>(found.f_type) == kFuse, local};
}

}  // namespace shardow::base
