#include "file/others.h"

#include <cerrno>
#include <iterator>
#include <system_error>

#include "base/errors.h"
#include "base/machine.h"

namespace shardow::file {
namespace {

using base::Found;
using base::Path;
namespace fs = std::filesystem;

/// Where there is nothing, or something older than `found`, which is another file.
bool is_news(const Found& found, const Path& to) {
  const auto there = base::look_at_itself(to);
  return !there || (!there->directory() && !there->same(found) && there->changed_ns() < found.changed_ns());
}

/// A link to the same file, or a copy.
void link_or_copy(const Path& from, const Path& to, const Found& found) {
  try {
    return base::link(from, to);
  } catch (const Error& error) {
    if (error.os_errno() == ENOENT) throw;
  }
  std::error_code error;
  if (found.link()) {
    fs::copy_symlink(from, to, error);
  } else if (found.regular()) {
    fs::copy_file(from, to, error);
    if (!error) base::sync(to);
  } else {
    error = std::make_error_code(std::errc::operation_not_supported);
  }
  if (error) base::fail_io(error.value(), from, "cannot be kept beside the new checkpoint");
}

void make_like(const Path& directory, const Path& model) {
  if (base::look_at_itself(directory)) return;
  base::make_directory(directory);
  std::error_code ignored;
  fs::permissions(directory, fs::status(model, ignored).permissions(), ignored);
}

bool move(const Path& from, const Path& to) noexcept {
  try {
    base::rename(from, to);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void rescue_in(const Path& from, const Path& to, const std::set<std::string>& replaced, bool old) {
  for (const std::string& name : base::names_in(from)) {
    const auto found = base::look_at_itself(from / name);
    if (!found) continue;
    if (found->directory()) {
      make_like(to / name, from / name);
      rescue_in(from / name, to / name, {}, old);
      continue;
    }
    const bool unseen = !old && (name.ends_with(".safetensors") || base::look_at_itself(to / name));
    const bool wanted = !unseen && !replaced.contains(name) && is_news(*found, to / name);
    if (wanted) {
      if (move(from / name, to / name)) base::sync(to);
    } else {
      base::remove_file(from / name);
    }
  }
  base::remove_directory(from);
}

}  // namespace

bool Others::keep() {
  std::error_code ignored;
  fs::permissions(draft_, fs::status(current_, ignored).permissions(), ignored);
  drop_gone(current_);
  const bool more = keep_in({});
  base::sync(draft_);
  return more;
}

bool Others::keep_in(const Path& at) {
  bool more = false;
  for (const std::string& name : base::names_in(current_ / at)) {
    const Path one = at / name;
    if (is_replaced(one)) continue;
    const auto found = base::look_at_itself(current_ / one);
    if (!found) continue;
    if (found->directory()) {
      make_like(draft_ / one, current_ / one);
      more = keep_in(one) || more;
      base::sync(draft_ / one);
    } else {
      more = keep_file(one, *found) || more;
    }
  }
  return more;
}

bool Others::keep_file(const Path& at, const Found& found) {
  if (is_kept(at, found)) return false;
  try {
    base::remove_file(draft_ / at);  // it was replaced after it was kept
    link_or_copy(current_ / at, draft_ / at, found);
  } catch (const Error& error) {
    if (error.os_errno() != ENOENT) throw;
    return false;  // it has gone meanwhile
  }
  kept_.insert_or_assign(at, found);
  return true;
}

/// Also where it was changed in place after it was linked; a copy has to be made again then.
bool Others::is_kept(const Path& at, const Found& found) const {
  const auto kept = kept_.find(at);
  if (kept == kept_.end() || !kept->second.same(found)) return false;
  const bool unchanged =
      kept->second.changed_ns() == found.changed_ns() && kept->second.status.st_size == found.status.st_size;
  if (unchanged) return true;
  const auto there = base::look_at_itself(fresh_ / at);
  return there && there->same(found);
}

/// What was linked, and then removed or renamed by its owner, does not come back.
void Others::drop_gone(const Path& old) {
  for (auto one = kept_.begin(); one != kept_.end();) {
    const auto there = base::look_at_itself(fresh_ / one->first);
    const bool gone =
        !base::look_at_itself(old / one->first) && base::look_at_itself(old);  // else it is the directory that has gone
    if (gone && there && there->same(one->second)) base::remove_file(fresh_ / one->first);
    one = gone ? kept_.erase(one) : std::next(one);
  }
}

void Others::move_from(const Path& old) noexcept {
  constexpr int kMostRounds = 10;  // of something that writes there all the time
  fresh_ = current_;
  try {
    const Path aside = temporary_path(current_, base::make_nonce(), Temporary::kSpent);
    const Path& spent = move(old, aside) ? aside : old;
    if (base::syscalls().left_one()) return;  // it may be either, and be moved at any moment
    drop_gone(spent);
    for (int round = 0; round < kMostRounds; ++round) {
      if (!move_in(spent, {})) return;
    }
  } catch (const std::exception&) {  // the rest stays, for the next save
  }
}

/// Whether the directory is still there.
bool Others::move_in(const Path& old, const Path& at) {
  bool moved = false;
  for (const std::string& name : base::names_in(old / at)) {
    const Path one = at / name;
    const auto found = base::look_at_itself(old / one);
    if (!found) continue;
    if (found->directory()) {
      if (!is_replaced(one)) make_like(current_ / one, old / one);
      move_in(old, one);
    } else if (is_replaced(one) || is_kept(one, *found)) {
      base::remove_file(old / one);
    } else {
      base::rename(old / one, current_ / one);
      moved = true;
    }
  }
  if (moved) base::sync(current_ / at);
  return base::syscalls().rmdir((old / at).c_str()) != 0;
}

Path set_aside(const Path& leftover, const Path& target, Temporary kind) {
  Path aside = temporary_path(target, base::make_nonce(), was_published(kind) ? Temporary::kSpent : kind);
  base::rename(leftover, aside);
  return aside;
}

void rescue(const Path& leftover, const Path& current, Temporary kind) noexcept {
  try {
    const Path aside = set_aside(leftover, current, kind);
    rescue_in(aside, current, hugging_face_names(aside), was_published(kind));
  } catch (const std::exception&) {  // the rest stays, for the next save
  }
}

}  // namespace shardow::file
