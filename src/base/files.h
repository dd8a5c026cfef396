// Files: handles that close themselves, calls that finish what they began, errors that say path and reason.
//
// Syscalls is the one seam between shardow and the kernel's files: tests pass in a failing disk. A file stays
// with the one that it was opened through.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "shardow/error.h"

namespace shardow::base {

using Path = std::filesystem::path;

/// The system calls that files need; each is the call of its name: -1 and errno on failure.
class Syscalls {
 public:
  virtual ~Syscalls() = default;
  virtual int open(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }
  virtual int openat(int directory, const char* name, int flags, mode_t mode) {
    return ::openat(directory, name, flags, mode);
  }
  virtual int close(int fd) { return ::close(fd); }
  virtual ssize_t pread(int fd, void* data, size_t bytes, off_t offset) { return ::pread(fd, data, bytes, offset); }
  virtual ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
    return ::pwrite(fd, data, bytes, offset);
  }
  virtual int ftruncate(int fd, off_t length) { return ::ftruncate(fd, length); }
  virtual int fsync(int fd) { return ::fsync(fd); }
  virtual int sync_file_range(int fd, off_t offset, off_t bytes, unsigned flags) {
    return ::sync_file_range(fd, offset, bytes, flags);
  }
  virtual int rename(const char* from, const char* to) { return ::rename(from, to); }
  virtual int mkdir(const char* path, mode_t mode) { return ::mkdir(path, mode); }
  virtual int link(const char* from, const char* to) { return ::link(from, to); }
  virtual int unlink(const char* path) { return ::unlink(path); }
  virtual int rmdir(const char* path) { return ::rmdir(path); }
  virtual int flock(int fd, int operation) { return ::flock(fd, operation); }
  virtual int statfs(const char* path, struct statfs* out) { return ::statfs(path, out); }
  virtual int stat(const char* path, struct stat* out) { return ::stat(path, out); }
  virtual int lstat(const char* path, struct stat* out) { return ::lstat(path, out); }
  virtual int list(const char* path, std::vector<std::string>* names);  ///< opendir and readdir, without "." and ".."

  /// Whether a call failed because it had not returned in time: it may be done later, and whoever sees this changes no
  /// names any more.
  virtual bool left_one() const noexcept { return false; }
};

Syscalls& syscalls() noexcept;  ///< where this thread's calls go

/// What this thread does until the end of the scope goes to `calls`; null: where it went before. What other threads do
/// does not.
class CallsTo {
 public:
  explicit CallsTo(Syscalls* calls) noexcept;
  ~CallsTo();
  CallsTo(const CallsTo&) = delete;
  CallsTo& operator=(const CallsTo&) = delete;

 private:
  Syscalls* const before_;
};

/// Throws what `error` means: kNotFound, kOutOfSpace (disk or quota), kOutOfMemory or kIo, with "path: what: strerror".
[[noreturn]] void fail_io(int error, const Path& path, const char* what);

/// Called where a process has as many files open as it may: closes some that can be opened again. Set once, by who
/// keeps such.
void set_room_maker(void (*close_some)()) noexcept;

/// Whether that is what `error` says, and room was made: try again.
bool make_room(int error) noexcept;

/// Which file a handle leads to, and in which state: equal identities have equal bytes, as far as the file system
/// tells.
struct Identity {
  uint64_t device, inode;
  int64_t size, modified;  ///< bytes; nanoseconds since 1970
  bool operator==(const Identity&) const = default;
};

/// Throws kInvalidArgument for a path with a NUL, behind which the kernel would read nothing.
void check_path(const Path& path);

class File {
 public:
  static File open(const Path& path);  ///< for reading, also a directory; never waits (a FIFO has no writer)
  static File open_in(const File& directory, const std::string& name);  ///< the same, wherever the directory is by now
  static File open_for_writing(
      const Path& path);                  ///< an existing file, never read: on NFS boundary pages must not be cached
  static File create(const Path& path);   ///< a new file, mode 0666 & ~umask; kIo with EEXIST where there is one
  static File replace(const Path& path);  ///< a new file, or an existing one emptied
  File(File&& other) noexcept;
  ~File();

  const Path& path() const noexcept { return path_; }
  int64_t size() const;       ///< bytes, now; throws kInvalidArgument for what is no regular file
  Identity identity() const;  ///< now
  bool is_directory() const;

  /// All of `data`, however many calls it takes. Throws kCorrupt where the file ends before: it was longer when it was
  /// planned.
  void read(std::span<std::byte> data, int64_t offset) const;
  std::string text() const;  ///< the whole file
  void write(std::span<const std::byte> data, int64_t offset);
  void begin_writing(int64_t offset,
                     int64_t bytes) noexcept;  ///< to the disk, so that sync() finds less to do; where that is possible
  void set_size(int64_t bytes);
  void sync();
  void close();  ///< reports what closing finds out (NFS writes then); the destructor can't

 private:
  File(Path path, int fd) noexcept : fd_(fd), path_(std::move(path)) {}  ///< copies the path before the file is open
  int fd_;
  Syscalls* calls_ = &syscalls();
  Path path_;
};

/// Returns whether open() or size() failed with `error` because the path leads to no regular file: to a directory, a
/// pipe, a socket, a loop of links.
bool is_of_no_file(const Error& error) noexcept;
bool is_of_no_file(int os_errno) noexcept;  ///< the same of open(2): a socket, a loop of links

/// Calls `fn`; throws the Error that a std::filesystem_error means.
template <class Fn>
auto in_our_words(Fn fn) {
  try {
    return fn();
  } catch (const std::filesystem::filesystem_error& error) {
    fail_io(error.code().value(), error.path1(), "cannot be looked at");
  }
}

void rename(const Path& from, const Path& to);
void sync(const Path& path);  ///< a file's bytes, or a directory's names, so that they survive a crash

/// Of the file system behind a directory.
struct Space {
  int64_t free_bytes;  ///< for us; the largest number where it does not count them
  bool fuse;           ///< a program's: such mounts seldom merge what several machines write into one file
  bool local;  ///< of a kind that one machine alone mounts, so that its locks are seen by everyone who writes there
};
Space space_at(const Path& directory);

}  // namespace shardow::base
