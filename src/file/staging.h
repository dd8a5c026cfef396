// A save's files until they are whole, and the one rename that commits them: docs/durability.md numbers the steps.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"
#include "file/index.h"
#include "file/path_lock.h"

namespace shardow::file {

/// Where a save goes, and where its files lie until they are whole. The same on all ranks.
struct Target {
  base::Path path;
  bool directory;
  bool hugging_face;      ///< files are named by us, and have an index where there are several
  std::string list_name;  ///< of the text that names several files; "": a single file, which commits itself
  std::string nonce;      ///< tells this save from others that may have died here
  std::string host;       ///< rank 0's, which makes the files

  // What rank 0 finds out, for all.
  bool in_place = false;       ///< `path` is a directory that was there before
  bool random_writes = false;  ///< and several ranks' writes into one file are merged
  bool renames = true;         ///< else files have their last names from the beginning

  base::Path file(const std::string& name) const;
};

/// Throws kInvalidArgument for what is no name of a checkpoint.
Target target_for(const base::Path& path, bool directory, bool hugging_face, std::string list_name);

using Sizes = std::vector<std::pair<std::string, int64_t>>;  ///< files by name, in bytes

/// Rank 0's. Nothing but the files of this save, what they replace and what dead saves left is ever changed.
class Staging {
 public:
  /// (2) Waits for another save to the same path until `until`, removes what dead ones left, checks that there is room,
  /// and makes the files, all of their length, whose first 8 bytes are zero: no reader takes them. Making them shows
  /// what the storage can do, which is written into `target`; where that is not random writes, they are gone again.
  Staging(Target& target, Sizes files, bool several_hosts, Until until);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  struct Texts {
    std::map<std::string, std::string> beside;  ///< by name: they are there an instant before the files
    /// The text that names the files, where they are called `names` and take the place of `replaced`.
    std::function<std::string(const std::vector<std::string>& names, const std::set<std::string>& replaced)> list;
  };

  /// (6) When everything in the files is on disk. Returns what they are called. What fails before the commit leaves
  /// what was there as it was.
  std::vector<std::string> commit(const Texts& texts);

  /// After a failure: removes what this save made, unless that is committed. Throws nothing.
  void discard() noexcept;

 private:
  void make_files();
  void find_out(bool merges);
  bool is_listed() const;
  void write_text(const std::string& name, const std::string& text);
  std::string put(size_t file);
  std::set<std::string> replaced_by(const std::vector<std::string>& names) const;
  std::vector<std::string> commit_in_directory(const Texts& texts);
  void commit_new(const Texts& texts, const std::vector<std::string>& names);

  Target& target_;
  const Sizes files_;
  std::unique_ptr<PathLock> lock_;
  bool first_ = true;                      ///< no save has left anything in the directory
  std::vector<base::Path> made_, placed_;  ///< under temporary names; under their own, which nothing names yet
  base::Path commits_;                     ///< what is renamed to commit, from just before that on
  bool committed_ = false;
};

/// Removes what dead saves to `path` left beside it and in it, unless a living one holds the path. For a path that
/// nobody may save to again.
void clear_dead(const base::Path& path) noexcept;

}  // namespace shardow::file
