// Put in front of libc (LD_PRELOAD): kill -9 at the n-th call that a process makes for a checkpoint. Counted are the calls that change a
// file system under one folder, and messages to other ranks.
//
// Until arm() nothing is counted. A process that is forked from an unarmed one is unarmed. Any thread's calls count.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { kSlotBytes = 64 };

static atomic_int armed;
static atomic_long calls;
static long fatal;
static int whole_group;
static char folder[PATH_MAX];
static char* log_slots;
static long num_slots;

/// Counts from now on. `n`: the number, from 0, of the call that is not made any more; negative for none. `group`: all processes of the
/// process group die with this one. `path`: absolute, without links. `log`: `slots` times 64 bytes, each the text of a call; shared memory
/// lets others read it after the death.
void arm(const char* path, long n, int group, char* log, long slots) {
  snprintf(folder, sizeof folder, "%s", path);
  fatal = n;
  whole_group = group;
  log_slots = log;
  num_slots = slots;
  atomic_store(&calls, 0);
  atomic_store(&armed, 1);
}

void disarm(void) {
  atomic_store(&armed, 0);
}

static void count(const char* call, const char* path) {
  const long this_one = atomic_fetch_add(&calls, 1);
  const char* slash = strrchr(path, '/');
  if (this_one < num_slots) snprintf(log_slots + this_one * kSlotBytes, kSlotBytes, "%s %s", call, slash ? slash + 1 : path);
  if (this_one != fatal) return;
  kill(whole_group ? 0 : getpid(), SIGKILL);
  for (;;) pause();
}

static int is_under_folder(const char* path) {
  const size_t length = strlen(folder);
  return path && strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static void at_path(const char* call, const char* path) {
  if (atomic_load(&armed) && is_under_folder(path)) count(call, path);
}

static void at_fd(const char* call, int fd) {
  if (!atomic_load(&armed)) return;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  path[length < 0 ? 0 : length] = 0;
  if (is_under_folder(path)) count(call, path);
}

static void at_place(const char* call, int directory, const char* path) {
  if (directory == AT_FDCWD || (path && path[0] == '/')) {
    at_path(call, path);
  } else {
    at_fd(call, directory);
  }
}

#define NEXT(name)                          \
  static __typeof__(&name) next;            \
  if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define AT_FD(result, name, parameters, arguments) \
  result name parameters {                         \
    NEXT(name);                                    \
    at_fd(#name, fd);                              \
    return next arguments;                         \
  }

#define AT_PATH(result, name, parameters, arguments) \
  result name parameters {                           \
    NEXT(name);                                      \
    at_path(#name, path);                            \
    return next arguments;                           \
  }

AT_FD(int, close, (int fd), (fd))
AT_FD(int, fsync, (int fd), (fd))
AT_FD(int, fdatasync, (int fd), (fd))
AT_FD(int, ftruncate, (int fd, off_t length), (fd, length))
AT_FD(int, ftruncate64, (int fd, off64_t length), (fd, length))
AT_FD(ssize_t, write, (int fd, const void* data, size_t bytes), (fd, data, bytes))
AT_FD(ssize_t, pwrite, (int fd, const void* data, size_t bytes, off_t offset), (fd, data, bytes, offset))
AT_FD(ssize_t, pwrite64, (int fd, const void* data, size_t bytes, off64_t offset), (fd, data, bytes, offset))
AT_PATH(int, mkdir, (const char* path, mode_t mode), (path, mode))
AT_PATH(int, rmdir, (const char* path), (path))
AT_PATH(int, unlink, (const char* path), (path))
AT_PATH(int, rename, (const char* from, const char* path), (from, path))
AT_PATH(int, link, (const char* from, const char* path), (from, path))

int unlinkat(int directory, const char* path, int flags) {
  NEXT(unlinkat);
  at_place("unlinkat", directory, path);
  return next(directory, path, flags);
}

int renameat2(int from_directory, const char* from, int to_directory, const char* to, unsigned flags) {
  NEXT(renameat2);
  at_place("renameat2", to_directory, to);
  return next(from_directory, from, to_directory, to, flags);
}

static mode_t mode_after(int flags, va_list rest) {
  return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name)                              \
  int name(const char* path, int flags, ...) {  \
    NEXT(name);                                 \
    va_list rest;                               \
    va_start(rest, flags);                      \
    const mode_t mode = mode_after(flags, rest); \
    va_end(rest);                               \
    at_path(#name, path);                       \
    return next(path, flags, mode);             \
  }

OPEN(open)
OPEN(open64)

/// A message to another rank, or to the store that ranks meet in.
ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  NEXT(send);
  if (atomic_load(&armed)) count("send", "a message");
  return next(fd, data, bytes, flags);
}

/// Of these only renameat2 counts, for which a C library may have no function of its own.
long syscall(long number, ...) {
  NEXT(syscall);
  va_list rest;
  va_start(rest, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_renameat2) at_place("renameat2", (int)a[2], (const char*)a[3]);
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
