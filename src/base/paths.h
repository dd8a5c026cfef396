// What is at a path, and changes to directories: typed errors for whatever a path leads to, names that survive a power
// cut.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>
#include <vector>

#include "base/files.h"

namespace shardow::base {

/// What lies at a path at this instant.
struct Found {
  struct stat status;

  bool directory() const noexcept { return S_ISDIR(status.st_mode); }
  bool regular() const noexcept { return S_ISREG(status.st_mode); }
  bool link() const noexcept { return S_ISLNK(status.st_mode); }
  bool same(const Found& other) const noexcept {
    return status.st_ino == other.status.st_ino && status.st_dev == other.status.st_dev;
  }
  int64_t changed_ns() const noexcept { return status.st_mtim.tv_sec * 1'000'000'000LL + status.st_mtim.tv_nsec; }
  int64_t placed_ns() const noexcept {  ///< when it got its name, or later
    return status.st_ctim.tv_sec * 1'000'000'000LL + status.st_ctim.tv_nsec;
  }
};

/// Nothing where there is nothing. Throws kIo for link loops, names that are too long, folders that may not be
/// searched.
std::optional<Found> look_at(const Path& path);         ///< follows links
std::optional<Found> look_at_itself(const Path& path);  ///< a link is a link
bool leads_to_directory(const Path& path);              ///< follows links

std::vector<std::string> names_in(const Path& directory);  ///< in no order; empty where there is no such directory

void make_directory(const Path& path);
void make_directories(const Path& path);      ///< as many as are missing, each flushed into the one above it
bool link(const Path& from, const Path& to);  ///< false where it cannot be done, or `to` is there
void remove_file(const Path& path);           ///< also a link; no error where there is none
void remove_directory(const Path& path);      ///< an empty one

/// A file, or a directory with the files in it. A directory in it stays, and so does what is in that.
void remove_tree(const Path& path) noexcept;

/// "." where `path` is a plain name.
Path parent_of(const Path& path);

}  // namespace shardow::base
