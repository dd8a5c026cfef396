#include "file/publish.h"

#include <cerrno>
#include <set>
#include <string>

#include "base/errors.h"
#include "base/paths.h"
#include "file/names.h"
#include "file/others.h"

namespace shardow::file {
namespace {

using base::look_at;
using base::parent_of;
using base::Path;

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
