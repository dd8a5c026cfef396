// One save at a time on a path: who saves there holds a lock on its draft. What no living save holds, a dead one has
// left.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "base/file_lock.h"
#include "file/names.h"

namespace shardow::file {

using Until = std::chrono::steady_clock::time_point;

/// Locks the parent of `target` for a moment, without which nobody looks for living saves there: held also while a
/// draft has another name. Others may lock it for reasons of their own: it is waited for a few seconds.
base::FileLock gate_of(const base::Path& target, Until until);

/// Puts back an old directory that stands beside a target that is missing. Then waits until no living save works on
/// `target`, calls `make`, which makes the draft, and locks it. Throws kTimeout with the draft of the other save at
/// `until`. Two processes that come at the same time are told apart where directories can be locked.
base::FileLock claim(const base::Path& target, const base::Path& draft, const std::function<void()>& make, Until until);

/// Locks `directory` itself, in which a save works in place; waits as claim() does.
base::FileLock claim_directory(const base::Path& directory, Until until);

/// Removes what dead saves to `target` left, after what is others' in it was moved to the target. On storage that other
/// machines may write too, what is younger than an hour stays. `for_good`: also what was replaced of a target that is
/// not there any more.
void clear_leftovers(const base::Path& target, const base::Path& draft, bool local, bool for_good = false) noexcept;

/// The same without a save, and puts back an old directory as claim() does: for a target that nobody may save to again.
/// Throws nothing.
void clear_dead(const base::Path& target) noexcept;

/// Whether the file, or a directory with what is in it, was changed in the last hour, by the clock of `reference`'s
/// file system.
bool is_young(const base::Path& path, const base::Path& reference);

}  // namespace shardow::file
