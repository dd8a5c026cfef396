// What lies in a directory beside its checkpoint: it is in the new directory as in the old one, also when it appears
// meanwhile. Nothing is deleted that is not in the new one.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "base/files.h"
#include "base/paths.h"
#include "file/names.h"

namespace shardow::file {

/// While one directory takes the place of another.
class Others {
 public:
  /// `replaced`: names in the directories that are the checkpoint's own.
  Others(base::Path current, base::Path draft, std::set<std::string> replaced)
      : current_(std::move(current)), draft_(std::move(draft)), fresh_(draft_), replaced_(std::move(replaced)) {}

  /// Links what is beside the old checkpoint into the draft, copies it where the file system has no links, and flushes
  /// the draft. Whether there was anything that was not there before.
  bool keep();

  /// After the new one is in place, and on the disk: what appeared in the old directory, or was renamed into place
  /// there, moves to the current one; then the old one, which gets another name first, is removed. What cannot be moved
  /// stays in it. Throws nothing.
  void move_from(const base::Path& old) noexcept;

 private:
  bool keep_in(const base::Path& at);
  bool keep_file(const base::Path& at, const base::Found& found);
  bool move_in(const base::Path& old, const base::Path& at);
  bool is_kept(const base::Path& at, const base::Found& found) const;
  bool is_replaced(const base::Path& at) const { return !at.has_parent_path() && replaced_.contains(at.string()); }

  void drop_gone(const base::Path& old);

  base::Path current_, draft_;
  base::Path fresh_;  ///< where the new directory is: the draft's path, then the current one
  std::set<std::string> replaced_;
  std::map<base::Path, base::Found> kept_;  ///< by path in the directory, as they were
};

/// Gives what lies beside `target`, and is about to be emptied, a name that nobody knows: a rename that a dead save
/// asked for may be under way, and be done at any moment; and what is emptied must not be taken for a whole checkpoint.
/// The new path.
base::Path set_aside(const base::Path& leftover, const base::Path& target, Temporary kind);

/// A directory that a dead save left: what is in it and not in `current`, beside checkpoints, moves there. `kind`: it
/// is one that a new one had replaced, else an unpublished draft, whose files no reader has ever seen. Then it is
/// removed. Throws nothing.
void rescue(const base::Path& leftover, const base::Path& current, Temporary kind) noexcept;

/// Whether it was a checkpoint under its name.
inline bool was_published(Temporary kind) {
  return kind == Temporary::kOld || kind == Temporary::kSpent;
}

}  // namespace shardow::file
