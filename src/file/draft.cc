#include "file/draft.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <set>
#include <span>
#include <string>
#include <system_error>

#include "base/errors.h"
#include "base/paths.h"
#include "base/timed_calls.h"
#include "file/index.h"
#include "file/names.h"
#include "file/others.h"

namespace shardow::file {
namespace {

using base::fail;
using base::look_at;
using base::look_at_itself;
using base::parent_of;
using base::Path;
namespace fs = std::filesystem;

/// Calls `fn`; false where it fails because the storage does not know such a thing.
template <class Fn>
bool is_supported(Fn fn) {
  try {
    fn();
    return true;
  } catch (const Error& error) {
    constexpr int kUnknown[] = {EINVAL, EOPNOTSUPP, ENOSYS, ESPIPE, EPERM, EXDEV};
    if (std::find(std::begin(kUnknown), std::end(kUnknown), error.os_errno()) == std::end(kUnknown)) throw;
    return false;
  }
}

/// The files at their full length, which takes writing at their ends.
void make_files(const Draft& draft, const Sizes& files) {
  const std::byte zeros[8] = {};
  for (const auto& [name, bytes] : files) {
    base::File file = base::File::replace(draft.file(name));
    file.set_size(bytes);
    file.write(std::span(zeros).first(1), bytes - 1);
    file.write(zeros, 0);
    file.close();
  }
}

void check_target(const Draft& draft, const Sizes& files) {
  const auto found = look_at(draft.target);
  if (!found) return;
  const std::string path = draft.target.string();
  if (!draft.directory && found->directory())
    fail(Code::kInvalidArgument, "{} is a directory; a single file is to be written there", path);
  if (!draft.directory && !found->regular())
    fail(Code::kInvalidArgument, "{} is neither a file nor a directory (a pipe, a device?); save to another name",
         path);
  if (!draft.directory) return;
  if (!found->directory())
    fail(Code::kInvalidArgument,
         "{} is a file; a directory is to be written there. Name it .safetensors for a single file", path);
  for (const auto& [name, bytes] : files) {
    if (base::leads_to_directory(draft.target / name))
      fail(Code::kInvalidArgument, "{} has a directory {}, where a file is to be written", path, name);
  }
}

/// The checkpoint is at `aside`, and comes back; where another save has published meanwhile, what is others' in it.
void move_back(const Draft& draft, const Path& aside) {
  try {
    base::rename(aside, draft.target);
  } catch (const Error&) {
    if (!base::leads_to_directory(draft.target))
      throw;  // who looks for it finds it beside, and the next save puts it back
    base::sync(parent_of(draft.target));
    rescue(aside, draft.target, Temporary::kOld);
  }
  base::sync(parent_of(draft.target));
}

/// Asks for something that file systems of this machine never do, a directory in place of one that is not empty, to
/// learn whether it may be moved at all. Were it done hours later, by storage that stands still now, the checkpoint
/// would be where an old one is looked for.
void check_movable(Draft& draft) {
  const Path full = temporary_path(draft.target, draft.nonce, Temporary::kOld);
  draft.tried = true;
  base::make_directory(full);
  base::File::create(full / kSingleName).close();  // which is never taken for somebody else's
  bool moved = false;
  try {
    base::rename(draft.target, full);
    moved = true;  // somebody who took this save for a dead one has removed `full`
  } catch (const Error& error) {
    if (base::syscalls().left_one()) throw;
    const int why = error.os_errno();
    if (why == EBUSY) {
      fail(Code::kUnsupported,
           "{} is a mount point, which no other directory can replace; save into a directory in it, {}",
           draft.target.string(), (draft.target / "model").string());
    }
    if (why == EXDEV) {
      fail(Code::kUnsupported,
           "{} belongs to a lower layer of an overlay (an image of a container) and cannot be replaced; save to "
           "another name",
           draft.target.string());
    }
  }
  if (moved) {
    draft.tried = false;
    return move_back(draft, full);
  }
  base::remove_file(full / kSingleName);
  base::remove_directory(full);
  draft.tried = false;
}

/// Whether a shard may be of another save in place that goes on: no index names it, and it is young.
bool is_anothers(const Draft& draft, const std::string& name) {
  return is_shard_of_a_save(name) && !names_in_index(draft.target).contains(name) &&
         is_young(draft.target / name, draft.target);
}

void make_draft(const Draft& draft) {
  if (draft.directory) {
    base::make_directory(draft.temporary);
  } else {
    base::File::create(draft.temporary).close();
  }
}

Storage probe(const Draft& draft, const Sizes& files, bool merges, Until until) {
  Storage storage;
  storage.random_writes = merges && is_supported([&] { make_files(draft, files); });
  if (!storage.random_writes && !draft.directory) base::File::replace(draft.temporary).close();  // something to rename
  const Path renamed = temporary_path(draft.target, draft.nonce, Temporary::kRenamed);
  const base::FileLock gate = gate_of(draft.target, until);
  storage.rename = is_supported([&] {
    base::rename(draft.temporary, renamed);
    base::rename(renamed, draft.temporary);
  });
  return storage;
}

/// After a failure, when the names are as they were: on the disk they may not be.
void flush_names(Draft& draft) noexcept {
  try {
    base::sync(parent_of(draft.target));
  } catch (const std::exception&) {
    draft.keep = true;
  }
}

/// Of a directory that was to be put under a name: another one is there.
bool is_taken(const Error& error) {
  return error.os_errno() == ENOTEMPTY || error.os_errno() == EEXIST;
}

/// What fails is taken back, but where a call was left: it may be done yet, and in no order that is known with those
/// that follow.
void put_in_place(Draft& draft, Others& others, const Path& old) {
  const Path parent = parent_of(draft.target);
  if (base::rename_exchange(draft.temporary, draft.target)) {
    const Path* at = &draft.temporary;  // of the old one
    try {
      base::rename(*at, old);  // from here on a dead save's leftover tells which of the two it is
      at = &old;
      base::sync(parent);
    } catch (...) {
      draft.keep = true;  // unless all of this goes well
      if (base::syscalls().left_one()) throw;
      base::rename_exchange(*at, draft.target);
      if (at == &old) base::rename(old, draft.temporary);
      draft.keep = false;
      flush_names(draft);
      throw;
    }
  } else {  // there is an instant without a checkpoint under its name; who looks for it finds the old one beside it
    base::sync(parent);  // and no older one, which was removed
    base::rename(draft.target, old);
    bool there = false;  // the new one
    try {
      base::sync(parent);
      base::rename(draft.temporary, draft.target);
      there = true;
      base::sync(parent);
    } catch (const Error& error) {
      draft.keep = true;
      if (base::syscalls().left_one()) throw;
      if (!there && is_taken(error)) {  // another save has published meanwhile, and what is others' belongs there
        base::sync(
            parent);  // before the old one is emptied: the other's own flush may have failed, or not have come yet
        rescue(old, draft.target, Temporary::kOld);
        draft.keep = false;
        throw;
      }
      if (there) base::rename(draft.target, draft.temporary);
      base::rename(old, draft.target);
      draft.keep = false;
      flush_names(draft);
      throw;
    }
  }
  others.move_from(old);
}

/// `own`: names of the new checkpoint's files.
void replace_directory(Draft& draft, const std::set<std::string>& own) {
  const Path old = temporary_path(draft.target, draft.nonce, Temporary::kOld);
  draft.locks.emplace_back().take(draft.target);  // so that nobody takes it for a leftover when it is the old one
  std::set<std::string> replaced = draft.hugging_face ? hugging_face_names(draft.target) : std::set<std::string>();
  replaced.insert(own.begin(), own.end());
  Others others(draft.target, draft.temporary, std::move(replaced));
  constexpr int kMostRounds = 10;  // of something that writes there all the time
  for (int round = 0; others.keep() && round < kMostRounds; ++round) {
  }
  put_in_place(draft, others, old);
}

/// What is there is replaced, or nothing is there.
void put(Draft& draft, const std::set<std::string>& own) {
  const Path parent = parent_of(draft.target);
  if (draft.directory && look_at(draft.target)) {
    try {
      return replace_directory(draft, own);
    } catch (const Error& error) {
      if (error.code() != Code::kNotFound || look_at(draft.target)) throw;  // else somebody has removed it meanwhile
    }
  }
  if (draft.directory) base::sync(draft.temporary);
  base::rename(draft.temporary, draft.target);
  base::sync(parent);
}

}  // namespace

Draft draft_for(const Path& target, bool directory, bool hugging_face, const std::string& nonce) {
  base::check_path(target);
  const Path plain = target.has_filename() ? target : target.parent_path();  // "dir/" is "dir"
  if (!plain.has_filename() || plain.filename() == "." || plain.filename() == "..")
    fail(Code::kInvalidArgument, "'{}' is no name for a checkpoint", target.string());
  const auto found = look_at_itself(plain);
  if (directory && found &&
      found->link()) {  // a link to a directory stays; one to a file is replaced, since blobs behind links are shared
    std::error_code error;
    const Path behind = fs::canonical(plain, error);
    if (error) {
      fail(Code::kInvalidArgument, "{} is a symbolic link to nothing, or to itself; remove it, or make its target ({})",
           plain.string(), error.message());
    }
    return draft_for(behind, directory, hugging_face, nonce);
  }
  return {plain, temporary_path(plain, nonce, Temporary::kDraft), nonce, directory, hugging_face};
}

Storage prepare(Draft& draft, const Sizes& files, bool several_hosts, Until until) {
  const Path parent = parent_of(draft.target);
  if (base::may_still_change(draft.target)) {
    fail(Code::kIo,
         "{}: an earlier save to this path was given up while the storage stood still, and what it asked for last is "
         "under way: done later, "
         "it would undo this save. Save to another name, or in another process",
         draft.target.string());
  }
  base::make_directories(parent);
  check_target(draft, files);
  const base::Space before = base::space_at(parent);
  draft.locks.push_back(claim(
      draft.target, draft.temporary, [&] { make_draft(draft); }, until));
  if (draft.directory && look_at(draft.target) && before.local) check_movable(draft);
  clear_leftovers(draft.target, draft.temporary, before.local);
  int64_t needed = 0;
  for (const auto& [name, bytes] : files) needed += bytes;
  const base::Space space = base::space_at(parent);
  if (space.free_bytes < needed) {
    throw Error(Code::kOutOfSpace,
                fmt::format("{}: the checkpoint takes {} bytes, {} are free; nothing was written", parent.string(),
                            needed, space.free_bytes),
                ENOSPC);
  }
  const Storage storage = probe(draft, files, !(space.fuse && several_hosts), until);
  if (!storage.rename) {
    discard(draft);
  } else if (!storage.random_writes) {
    if (!draft.directory) base::remove_tree(draft.temporary);
    for (const auto& [name, bytes] : files) base::remove_tree(draft.temporary / name);
  }
  return storage;
}

void prepare_in_place(Draft& draft, const std::vector<std::string>& files, Until until) {
  if (!draft.directory) return;
  if (!look_at(draft.target)) {
    base::make_directory(draft.target);
    base::sync(parent_of(draft.target));
  }
  draft.locks.push_back(claim_directory(draft.target, until));
  for (const std::string& name : files) {
    if (!look_at_itself(draft.target / name)) continue;
    fail(Code::kUnsupported,
         "{}: this storage cannot rename, so {} files could not take the place of those that are there ({}) at once; "
         "save to another "
         "directory",
         draft.target.string(), files.size(), name);
  }
  draft.made_here = files;
  if (draft.hugging_face) draft.replaced = hugging_face_names(draft.target);
  const bool alone = draft.locks.back().held() && base::space_at(draft.target).local;
  std::erase_if(draft.replaced,
                [&](const std::string& name) { return name == kIndexName || (!alone && is_anothers(draft, name)); });
}

void release(Draft& draft) noexcept {
  draft.locks.clear();
}

void discard(Draft& draft) noexcept {
  if (draft.keep) return release(draft);
  base::remove_tree(draft.temporary);
  try {
    base::remove_tree(temporary_path(draft.target, draft.nonce, Temporary::kRenamed));
    if (draft.tried) base::remove_tree(temporary_path(draft.target, draft.nonce, Temporary::kOld));
    if (draft.in_place) {
      for (const std::string& name : draft.made_here) base::remove_tree(draft.target / name);
    }
  } catch (const std::exception&) {
  }
  draft.made_here.clear();
  release(draft);
}

void publish(Draft& draft) {
  std::set<std::string> own;
  for (const std::string& name : base::names_in(draft.temporary)) own.insert(name);
  constexpr int kMostTurns = 10;  // with other saves to this path, which publish between our look and our rename
  for (int turn = 1;; ++turn) {
    try {
      return put(draft, own);
    } catch (const Error& error) {
      if (!draft.directory || !is_taken(error) || draft.keep || turn == kMostTurns) throw;
    }
  }
}

void remove_old(const Draft& draft) {
  for (const std::string& name : draft.replaced) base::remove_tree(draft.target / name);
}

}  // namespace shardow::file
