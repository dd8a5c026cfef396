#include "file/staging.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <optional>
#include <span>
#include <system_error>

#include "base/errors.h"
#include "base/machine.h"
#include "base/paths.h"
#include "base/timed_calls.h"
#include "file/names.h"

namespace shardow::file {
namespace {

using base::fail;
using base::look_at;
using base::look_at_itself;
using base::parent_of;
using base::Path;

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

void check_target(const Target& target, const Sizes& files) {
  const auto found = look_at(target.path);
  if (!found) return;
  const std::string path = target.path.string();
  if (!target.directory && found->directory())
    fail(Code::kInvalidArgument, "{} is a directory; a single file is to be written there", path);
  if (!target.directory && !found->regular())
    fail(Code::kInvalidArgument, "{} is neither a file nor a directory (a pipe, a device?); save to another name",
         path);
  if (!target.directory) return;
  if (!found->directory())
    fail(Code::kInvalidArgument,
         "{} is a file; a directory is to be written there. Name it .safetensors for a single file", path);
  for (const auto& [name, bytes] : files) {
    if (base::leads_to_directory(target.path / name))
      fail(Code::kInvalidArgument, "{} has a directory {}, where a file is to be written", path, name);
  }
}

/// Whether the file, or a directory with what is in it, was changed in the last hour before `reference` was.
bool is_young(const Path& path, const Path& reference) {
  constexpr int64_t kHour = 3'600'000'000'000;
  const auto now = look_at_itself(reference), found = look_at_itself(path);
  if (!now || !found) return false;
  int64_t newest = found->changed_ns();
  for (const std::string& name : found->directory() ? base::names_in(path) : std::vector<std::string>()) {
    if (const auto in = look_at_itself(path / name)) newest = std::max(newest, in->changed_ns());
  }
  return newest > now->changed_ns() - kHour;
}

/// What dead saves left at a path whose lock is held. On storage that other machines may write too, or whose locks are
/// not known, what is younger than an hour stays: its save may live.
class Leavings {
 public:
  Leavings(const Path& path, const PathLock& lock, bool local) : path_(path), lock_(lock), all_(local && lock.held()) {}

  /// A save that died may have given a name a moment ago, so directories are flushed before anything is removed. A call
  /// of its that stood still may be done at any moment, so a directory gets a name that nobody knows before it is
  /// emptied. Returns whether there was anything.
  bool clear_beside() {
    std::vector<Leftover> dead = leftovers_of(path_);
    const Path folder = parent_of(path_);
    std::erase_if(dead, [&](const Leftover& one) { return !is_dead(one.path) || is_locked(lock_path(folder)); });
    if (!dead.empty()) base::sync(folder);
    for (const Leftover& one : dead) {
      const auto found = look_at_itself(one.path);
      if (!found || !found->directory()) {
        base::remove_file(one.path);
        continue;
      }
      const Path aside = temporary_path(path_, base::make_nonce());
      base::rename(one.path, aside);
      base::remove_tree(aside);
    }
    return !dead.empty();
  }

  /// In the directory, and what was replaced there and was not yet removed. What would name files comes first: a rename
  /// of it that comes late finds nothing.
  bool clear_inside() {
    std::vector<Leftover> drafts = leftovers_in(path_);
    std::erase_if(drafts, [&](const Leftover& one) { return !is_dead(one.path) || is_locked(one.lock_path); });
    for (const Leftover& draft : drafts) {
      if (!draft.stem.ends_with(".safetensors")) base::remove_file(draft.path);
    }
    const Listing named = read_lists();
    std::set<std::string> going = named.replaced;
    for (const std::string& name : base::names_in(path_)) {
      if (has_nonce(name) && is_dead(path_ / name)) going.insert(name);
    }
    std::erase_if(going, [&](const std::string& name) { return named.names(name); });
    if (drafts.empty() && going.empty()) return false;
    base::sync(path_);
    for (const std::string& name : going) base::remove_file(path_ / name);
    for (const Leftover& draft : drafts) {
      const Path own = path_ / draft.stem;
      const auto one = look_at_itself(draft.path), other = look_at_itself(own);
      if (one && other && one->same(*other) && !named.names(draft.stem)) base::remove_file(own);
      base::remove_file(draft.path);
    }
    return true;
  }

 private:
  bool is_dead(const Path& path) const { return all_ || !is_young(path, lock_.path()); }

  /// All that name files there, as one. Throws kCorrupt where one cannot be read, so that nothing is removed.
  Listing read_lists() const {
    Listing all;
    for (const char* name : {kIndexName, kAveragesName, kManifestName}) {
      const auto listing = listing_in(path_, name);
      const auto list = look_at_itself(path_ / name);
      if (!listing && list) fail(Code::kCorrupt, "{} cannot be read", (path_ / name).string());
      if (!listing || !list) continue;
      for (const auto& [key, file] : listing->files) all.files[file] = file;
      for (const std::string& file : listing->replaced) {  // unless somebody has made one of that name since
        const auto found = look_at_itself(path_ / file);
        if (found && found->placed_ns() <= list->placed_ns()) all.replaced.insert(file);
      }
    }
    return all;
  }

  const Path path_;
  const PathLock& lock_;
  const bool all_;
};

}  // namespace

Path Target::file(const std::string& name) const {
  if (!directory) return renames ? temporary_path(path, nonce) : path;
  if (!renames) return path / name;
  return in_place ? temporary_path(path / name, nonce) : temporary_path(path, nonce) / name;
}

Target target_for(const Path& path, bool directory, bool hugging_face, std::string list_name) {
  base::check_path(path);
  const Path plain = path.has_filename() ? path : path.parent_path();  // "dir/" is "dir"
  if (!plain.has_filename() || plain.filename() == "." || plain.filename() == "..")
    fail(Code::kInvalidArgument, "'{}' is no name for a checkpoint", path.string());
  const auto found = look_at_itself(plain);
  if (directory && found &&
      found->link()) {  // a link to a directory stays; one to a file is replaced, since blobs behind links are shared
    std::error_code error;
    const Path behind = std::filesystem::canonical(plain, error);
    if (error) {
      fail(Code::kInvalidArgument, "{} is a symbolic link to nothing, or to itself; remove it, or make its target ({})",
           plain.string(), error.message());
    }
    return target_for(behind, directory, hugging_face, std::move(list_name));
  }
  return {plain, directory, hugging_face, std::move(list_name), {}, {}};
}

Staging::Staging(Target& target, Sizes files, bool several_hosts, Until until)
    : target_(target), files_(std::move(files)) {
  const Path folder = parent_of(target.path);
  if (base::may_still_change(target.path)) {
    fail(Code::kIo,
         "{}: an earlier save to this path was given up while the storage stood still, and what it asked for last is "
         "under way: done later, it would undo this save. Save to another name, or in another process",
         target.path.string());
  }
  base::make_directories(folder);
  lock_ = std::make_unique<PathLock>(target.path, until);  // 2a
  check_target(target, files_);
  target.in_place = target.directory && look_at(target.path);
  try {  // 2b
    Leavings left(target.path, *lock_, base::space_at(target.in_place ? target.path : folder).local);
    left.clear_beside();
    target.in_place = target.directory && look_at(target.path);  // a rename that was left may be done until here
    first_ = target.in_place && !left.clear_inside() && !listing_in(target.path, target.list_name.c_str());
  } catch (const std::exception&) {  // they stay, and the next save tries again
    first_ = false;
  }
  const Path at = target.in_place ? target.path : folder;
  int64_t needed = 0;  // 2c
  for (const auto& [name, bytes] : files_) needed += bytes;
  const base::Space space = base::space_at(at);
  if (space.free_bytes < needed) {
    throw Error(Code::kOutOfSpace,
                fmt::format("{}: the checkpoint takes {} bytes, {} are free; nothing was written", at.string(), needed,
                            space.free_bytes),
                ENOSPC);
  }
  try {
    find_out(!(space.fuse && several_hosts));  // 2d
  } catch (...) {
    discard();
    throw;
  }
}

/// The files at their full length, which takes writing at their ends.
void Staging::make_files() {
  const std::byte zeros[8] = {};
  for (const auto& [name, bytes] : files_) {
    base::File file = base::File::replace(target_.file(name));
    file.set_size(bytes);
    file.write(std::span(zeros).first(1), bytes - 1);
    file.write(zeros, 0);
    file.close();
  }
}

void Staging::find_out(bool merges) {
  const bool new_directory = target_.directory && !target_.in_place;
  const std::string& name = files_.front().first;
  const Path draft = new_directory ? target_.file(name).parent_path() : target_.file(name);
  const Path renamed = temporary_path(target_.in_place ? target_.path / name : target_.path, base::make_nonce());
  for (const auto& [file, bytes] : files_) made_.push_back(target_.file(file));
  if (new_directory) made_.push_back(draft);
  made_.push_back(renamed);
  if (new_directory) base::make_directory(draft);
  target_.random_writes = merges && is_supported([&] { make_files(); });
  if (!target_.random_writes && !new_directory) base::File::replace(draft).close();  // something to rename
  target_.renames = is_supported([&] {
    base::rename(draft, renamed);
    base::rename(renamed, draft);
  });
  if (target_.renames && target_.random_writes) return;
  for (size_t i = 0; i < files_.size(); ++i) base::remove_tree(made_[i]);
  if (target_.renames) return;
  base::remove_tree(draft);
  made_.clear();
  if (!target_.directory) return;
  if (new_directory) {
    base::make_directory(target_.path);
    base::sync(parent_of(target_.path));
  }
  if (target_.list_name.empty() && look_at_itself(target_.path / name)) {
    fail(Code::kUnsupported,
         "{}: this storage cannot rename, so a file could not take the place of {}, which is there, at once; save to "
         "another directory",
         target_.path.string(), name);
  }
  for (size_t i = 0; i < files_.size(); ++i) placed_.push_back(target_.path / put(i));
}

bool Staging::is_listed() const {
  if (!target_.directory || target_.list_name.empty()) return false;
  return !target_.hugging_face || files_.size() > 1 || !target_.renames ||
         (target_.in_place && look_at(target_.path / kIndexName));
}

void Staging::write_text(const std::string& name, const std::string& text) {
  const Path path = target_.file(name);
  if (target_.renames) made_.insert(made_.begin(), path);
  base::File file = base::File::replace(path);
  file.write(std::as_bytes(std::span(text)), 0);
  file.sync();
  file.close();
}

/// 6a: gives a file its own name: a plain one where no save was before, and nothing has it, else one with the nonce. A
/// plain name is a second one until the commit, by which the next save sees whose the file is.
std::string Staging::put(size_t file) {
  const std::string& name = files_[file].first;
  const Path draft = target_.file(name), plain = target_.path / name;
  std::string with_nonce = name_with_nonce(name, target_.nonce, file, files_.size());
  if (!target_.renames) return target_.list_name.empty() ? name : with_nonce;
  if (target_.hugging_face && files_.size() == 1) {  // what readers take that do not look for an index
    const auto old = listing_in(target_.path, kIndexName);
    if (!old || !old->names(name)) {
      if (!look_at_itself(plain)) placed_.push_back(plain);
      base::rename(draft, plain);
      return name;
    }
  }
  if (first_ && base::link(draft, plain)) {
    placed_.push_back(plain);
    return name;
  }
  placed_.push_back(target_.path / with_nonce);
  base::rename(draft, placed_.back());
  return with_nonce;
}

/// What the old list names, or where there is none the plain names of named files; but for names that the new files
/// have. In the Hugging Face layout also model.safetensors, which readers take that do not look for an index: a save
/// may have died when it had put that there and its index not yet.
std::set<std::string> Staging::replaced_by(const std::vector<std::string>& names) const {
  std::set<std::string> replaced;
  if (const auto old = listing_in(target_.path, target_.list_name.c_str())) {
    for (const auto& [key, file] : old->files) replaced.insert(file);
  } else if (!target_.hugging_face && !look_at_itself(target_.path / target_.list_name)) {
    for (const auto& [name, bytes] : files_) replaced.insert(name);
  }
  if (target_.hugging_face) replaced.insert(kSingleName);
  std::erase_if(replaced, [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end() || !look_at_itself(target_.path / name);
  });
  return replaced;
}

std::vector<std::string> Staging::commit_in_directory(const Texts& texts) {
  base::sync(parent_of(target_.path));  // 6a: who made the directory may not have flushed its name
  const bool listed = is_listed();
  std::vector<std::string> names;
  for (size_t i = 0; i < files_.size(); ++i) names.push_back(listed ? put(i) : files_[i].first);  // 6a
  for (const auto& [name, text] : texts.beside) {
    write_text(name, text);
    if (target_.renames) base::rename(target_.file(name), target_.path / name);
  }
  std::set<std::string> replaced;
  if (listed) {
    replaced = replaced_by(names);
    committed_ = !target_.renames;
    write_text(target_.list_name, texts.list(names, replaced));
  }
  if (target_.renames) {
    if (listed || !texts.beside.empty()) base::sync(target_.path);
    const std::string& name = listed ? target_.list_name : names[0];
    commits_ = target_.file(name);
    base::rename(commits_, target_.path / name);  // 6b
    committed_ = true;
    base::sync(target_.path);  // 6c
  }
  try {  // 6d
    for (const std::string& name : replaced) base::remove_file(target_.path / name);
    if (listed && target_.renames && target_.hugging_face && names[0] == kSingleName)
      base::remove_file(target_.path / kIndexName);
    for (const auto& [name, bytes] : files_) {
      if (listed && target_.renames && first_) base::remove_file(target_.file(name));
    }
  } catch (const Error&) {  // the next save does
  }
  return names;
}

void Staging::commit_new(const Texts& texts, const std::vector<std::string>& names) {
  for (const auto& [name, text] : texts.beside) write_text(name, text);
  if (is_listed()) write_text(target_.list_name, texts.list(names, {}));
  commits_ = target_.directory ? target_.file("").parent_path() : target_.file("");
  if (target_.directory) base::sync(commits_);  // 6a
  try {
    base::rename(commits_, target_.path);  // 6b
  } catch (const Error& error) {
    if (error.os_errno() != ENOTEMPTY && error.os_errno() != EEXIST) throw;
    fail(Code::kIo, "{} was made by somebody else while it was saved; save again", target_.path.string());
  }
  committed_ = true;
  base::sync(parent_of(target_.path));  // 6c
}

std::vector<std::string> Staging::commit(const Texts& texts) {
  if (target_.directory && (target_.in_place || !target_.renames)) return commit_in_directory(texts);
  std::vector<std::string> names;
  for (const auto& [name, bytes] : files_) names.push_back(name);
  if (target_.renames) commit_new(texts, names);
  return names;
}

void Staging::discard() noexcept {
  if (committed_ || base::syscalls().left_one()) return;  // the next save removes what is to go
  try {
    if (!commits_.empty() && !look_at_itself(commits_)) return;  // an error, and done all the same
    if (!commits_.empty() && target_.in_place) base::remove_file(commits_);
    for (const Path& path : placed_) base::remove_file(path);
    if (!placed_.empty()) base::sync(target_.path);
    for (const Path& path : made_) base::remove_tree(path);
  } catch (const std::exception&) {
  }
}

void clear_dead(const Path& path) noexcept {
  try {
    if (is_locked(lock_path(path))) return;
    const PathLock lock(path, Until());
    Leavings left(path, lock, base::space_at(parent_of(path)).local);
    left.clear_beside();
    if (base::leads_to_directory(path)) left.clear_inside();
  } catch (const std::exception&) {
  }
}

}  // namespace shardow::file
