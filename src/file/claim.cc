#include "file/claim.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "base/paths.h"
#include "base/turns.h"
#include "file/others.h"

namespace shardow::file {
namespace {

using base::FileLock;
using base::Path;

constexpr std::chrono::milliseconds kPause{20};
constexpr std::chrono::seconds kGate{5};  // of waiting for the parent

[[noreturn]] void fail_busy(const Path& target, const Path& draft) {
  base::fail(Code::kTimeout,
             "{}: another save to this path is under way and does not end: a living process holds {}. Save from one "
             "rank, to one path per "
             "model; ranks that hold parts or copies of one model save together, with the wrapped model or with group=",
             target.string(), draft.string());
}

/// The draft of a save that lives, whatever its name is when it is asked.
std::optional<Path> living(const Path& target) {
  constexpr int kMostTurns = 10;  // with names that go between our look and our lock
  bool moved = true;
  for (int turn = 0; moved && turn < kMostTurns; ++turn) {
    moved = false;
    for (const Leftover& one : leftovers_of(target)) {
      FileLock lock;
      const FileLock::Result result = lock.take(one.path);
      if (result == FileLock::Result::kOthers) return one.path;
      moved |= result == FileLock::Result::kGone;
    }
  }
  return std::nullopt;
}

void put_back_old(const Path& target) {
  const std::optional<Path> old = old_of(target);
  if (!old || !base::leads_to_directory(*old)) return;
  try {
    base::rename(*old, target);
  } catch (const Error&) {
    if (base::leads_to_directory(target)) return;  // a rename that a save gave up long ago was done this moment
    throw;
  }
  base::sync(base::parent_of(target));
}

}  // namespace

FileLock gate_of(const Path& target, Until until) {
  const Path parent = base::parent_of(target);
  FileLock gate;
  const Until patience = std::min(until, base::now() + kGate);
  while (gate.take(parent) == FileLock::Result::kOthers && base::now() < patience) base::sleep_for(kPause);
  return gate;
}

FileLock claim(const Path& target, const Path& draft, const std::function<void()>& make, Until until) {
  for (std::optional<Path> other;;) {
    {
      const FileLock gate = gate_of(target, until);  // between looking for others and being one
      other = living(target);
      if (!other) {
        put_back_old(target);
        make();
        FileLock lock;
        lock.take(draft);
        return lock;
      }
    }
    if (base::now() >= until) fail_busy(target, *other);
    base::sleep_for(kPause);
  }
}

FileLock claim_directory(const Path& directory, Until until) {
  FileLock lock;
  while (lock.take(directory) == FileLock::Result::kOthers) {
    if (base::now() >= until) fail_busy(directory, directory);
    base::sleep_for(kPause);
  }
  return lock;
}

bool is_young(const Path& path, const Path& reference) {
  constexpr int64_t kHour = 3'600'000'000'000;
  const auto now = base::look_at_itself(reference), found = base::look_at_itself(path);
  if (!now || !found) return false;
  int64_t newest = found->changed_ns();
  if (found->directory()) {
    for (const std::string& name : base::names_in(path)) {
      if (const auto in = base::look_at_itself(path / name)) newest = std::max(newest, in->changed_ns());
    }
  }
  return newest > now->changed_ns() - kHour;
}

void clear_leftovers(const Path& target, const Path& draft, bool local, bool for_good) noexcept {
  try {
    bool flushed = false;
    for (const Leftover& one : leftovers_of(target)) {
      if (one.path == draft) continue;
      FileLock lock, of_maker;
      const FileLock::Result result = lock.take(one.path);
      const bool made =
          one.kind !=
          Temporary::kDraft;  // by a save whose draft is locked while it lives, and which needs this one too
      const FileLock::Result maker =
          made ? of_maker.take(temporary_path(target, one.nonce, Temporary::kDraft)) : result;
      const bool dead = result == FileLock::Result::kHeld && maker != FileLock::Result::kUnknown && local;
      if (result == FileLock::Result::kOthers || result == FileLock::Result::kGone ||
          maker == FileLock::Result::kOthers)
        continue;
      if (!dead && is_young(one.path, draft)) continue;
      // Who died may have given it this name a moment ago, and the disk may still have it under the checkpoint's.
      if (!std::exchange(flushed, true)) base::sync(base::parent_of(target));
      const auto found = base::look_at_itself(one.path);
      const bool directory = found && found->directory();
      if (directory && base::leads_to_directory(target)) {
        rescue(one.path, target, one.kind);
      } else if (!directory || !was_published(one.kind) || (for_good && one.kind == Temporary::kSpent)) {
        base::remove_tree(directory ? set_aside(one.path, target, one.kind) : one.path);
      }
    }
  } catch (const std::exception&) {  // it stays, and the next save tries again
  }
}

void clear_dead(const Path& target) noexcept {
  try {
    const Path parent = base::parent_of(target);
    FileLock gate;
    if (gate.take(parent) == FileLock::Result::kOthers || living(target)) return;
    put_back_old(target);
    clear_leftovers(target, parent, base::space_at(parent).local, true);
  } catch (const std::exception&) {
  }
}

}  // namespace shardow::file
