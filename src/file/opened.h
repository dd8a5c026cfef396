// Files of a checkpoint that stay what they were: each is opened once, and read through that handle whatever happens to
// its path.
#pragma once

#include <list>
#include <memory>

#include "base/files.h"

namespace shardow::file {

/// One file. Its handle stays open as long as this process keeps few enough of them (a quarter of what `ulimit -n`
/// allows, 512 at most, all checkpoints together); the one that was used the longest ago is closed first, and opened
/// again when it is asked for. Where the process has as many files open as it may, all that are idle are closed. For
/// any thread.
class Opened {
 public:
  /// `directory`: where it is opened again, wherever that directory is by then; none: by its path.
  explicit Opened(base::File file, std::shared_ptr<const base::File> directory = nullptr);
  ~Opened();
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  /// Throws kIo with ESTALE where it had to be opened again, and another file is there, or it has changed.
  std::shared_ptr<const base::File> handle();

  /// Throws kIo with ESTALE where its bytes were written over since it was opened.
  void check_unchanged();

  const base::Path& path() const noexcept { return path_; }
  const base::Identity& identity() const noexcept { return identity_; }

 private:
  friend class Handles;
  base::Path path_;
  base::Identity identity_;
  std::shared_ptr<const base::File> directory_;
  base::Syscalls* calls_ =
      &base::syscalls();  // of where it was opened: those of whoever reads it later may be gone before it is
  std::shared_ptr<const base::File> file_;  // guarded by the handles' mutex; null while it is closed
  std::list<Opened*>::iterator place_;      // among those that are open
};

}  // namespace shardow::file
