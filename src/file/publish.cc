#include "file/publish.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <span>
#include <system_error>

#include "base/errors.h"
#include "file/index.h"

namespace shardow::file {
namespace {

using base::fail;
using base::Path;
namespace fs = std::filesystem;

Path parent_of(const Path& path) {
  return path.has_parent_path() ? path.parent_path() : Path(".");
}

std::string prefix_of(const Path& target) {
  return "." + target.filename().string() + ".";
}

bool is_leftover(const std::string& name, const std::string& prefix) {
  return name.size() > prefix.size() + 4 && name.rfind(prefix, 0) == 0 && name.compare(name.size() - 4, 4, ".tmp") == 0;
}

bool is_ours(const std::string& name) {
  return name == kSingleName || name == kIndexName || (name.rfind("model-", 0) == 0 && name.ends_with(".safetensors"));
}

/// A file, or a directory with all that is in it.
void flush(const Path& path) {
  if (fs::is_symlink(path)) return;
  if (fs::is_directory(path)) {
    for (const fs::directory_entry& entry : fs::directory_iterator(path)) flush(entry.path());
  }
  base::sync(path);
}

/// What stands beside the old checkpoint in its directory (configuration, tokenizer) stands beside the new one, as links where the file
/// system has them.
void keep_others(const Draft& draft) {
  if (!fs::is_directory(draft.target)) return;
  std::error_code ignored;
  fs::permissions(draft.temporary, fs::status(draft.target).permissions(), ignored);
  for (const fs::directory_entry& entry : fs::directory_iterator(draft.target)) {
    const Path to = draft.temporary / entry.path().filename();
    std::error_code error;
    if (is_ours(entry.path().filename().string()) || fs::exists(fs::symlink_status(to, error))) continue;  // replaced
    constexpr auto kAll = fs::copy_options::recursive | fs::copy_options::copy_symlinks;
    fs::copy(entry.path(), to, kAll | fs::copy_options::create_hard_links, error);
    if (error) {
      fs::remove_all(to, error);
      fs::copy(entry.path(), to, kAll, error);
    }
    if (error) base::fail_io(error.value(), entry.path(), "cannot be kept beside the new checkpoint");
    flush(to);
  }
}

void remove_leftovers(const Path& target) {
  std::error_code ignored;
  std::vector<Path> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent_of(target), ignored)) {
    if (is_leftover(entry.path().filename().string(), prefix_of(target))) found.push_back(entry.path());
  }
  for (const Path& path : found) fs::remove_all(path, ignored);
}

/// Where the draft is for an instant, to see whether it can be renamed.
Path renamed(const Draft& draft) {
  return parent_of(draft.target) / (prefix_of(draft.target) + draft.nonce + "-renamed.tmp");
}

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
void make_files(const Draft& draft, const std::vector<std::pair<std::string, int64_t>>& files) {
  const std::byte zeros[8] = {};
  for (const auto& [name, bytes] : files) {
    base::File file = base::File::create(draft.file(name));
    file.set_size(bytes);
    file.write(std::span(zeros).first(1), bytes - 1);
    file.write(zeros, 0);
    file.close();
  }
}

void check_target(const Draft& draft) {
  if (!draft.directory && fs::is_directory(draft.target))
    fail(Code::kInvalidArgument, "{} is a directory; a single file is to be written there", draft.target.string());
  if (draft.directory && fs::exists(draft.target) && !fs::is_directory(draft.target)) {
    fail(Code::kInvalidArgument, "{} is a file; a directory is to be written there. Name it .safetensors for a single file",
         draft.target.string());
  }
}

}  // namespace

Draft draft_for(const Path& target, bool directory, const std::string& nonce) {
  const Path plain = target.has_filename() ? target : target.parent_path();  // "dir/" is "dir"
  if (!plain.has_filename() || plain.filename() == "." || plain.filename() == "..")
    fail(Code::kInvalidArgument, "'{}' is no name for a checkpoint", target.string());
  if (directory && fs::is_symlink(plain)) {  // a link to a directory stays; one to a file is replaced, since blobs behind links are shared
    std::error_code error;
    const Path behind = fs::canonical(plain, error);
    if (error) fail(Code::kInvalidArgument, "{} is a symbolic link to nothing; remove it, or make its target", plain.string());
    return draft_for(behind, directory, nonce);
  }
  return {plain, parent_of(plain) / (prefix_of(plain) + nonce + ".tmp"), nonce, directory};
}

Storage prepare(const Draft& draft, const std::vector<std::pair<std::string, int64_t>>& files, bool several_hosts) {
  const Path parent = parent_of(draft.target);
  std::error_code error;
  fs::create_directories(parent, error);
  if (error) base::fail_io(error.value(), parent, "cannot make the directory");
  check_target(draft);
  remove_leftovers(draft.target);
  int64_t needed = 0;
  for (const auto& [name, bytes] : files) needed += bytes;
  const base::Space space = base::space_at(parent);
  if (space.free_bytes < needed) {
    fail(Code::kOutOfSpace, "{}: the checkpoint takes {} bytes, {} are free; nothing was written", parent.string(), needed,
         space.free_bytes);
  }
  if (draft.directory) base::make_directory(draft.temporary);
  Storage storage;
  storage.random_writes = !(space.fuse && several_hosts) && is_supported([&] { make_files(draft, files); });
  if (!storage.random_writes && !draft.directory) base::File::replace(draft.temporary).close();  // something to rename
  storage.rename = is_supported([&] {
    base::rename(draft.temporary, renamed(draft));
    base::rename(renamed(draft), draft.temporary);
  });
  if (!storage.random_writes || !storage.rename) {
    discard(draft);
    if (draft.directory && storage.rename) base::make_directory(draft.temporary);
  }
  return storage;
}

void prepare_in_place(const Draft& draft) {
  if (draft.directory && !fs::exists(draft.target)) base::make_directory(draft.target);
}

void publish(const Draft& draft) {
  if (draft.directory) keep_others(draft);
  if (draft.directory) base::sync(draft.temporary);
  if (draft.directory && fs::exists(draft.target)) {
    if (base::exchange(draft.temporary, draft.target)) {
      base::sync(parent_of(draft.target));
      discard(draft);  // what was there before
      return;
    }
    // Without an exchange there is an instant without a checkpoint under its name; the old one is beside it until the new one is there.
    Path old = draft.temporary;
    old += ".old.tmp";
    base::rename(draft.target, old);
    base::rename(draft.temporary, draft.target);
    base::sync(parent_of(draft.target));
    std::error_code ignored;
    fs::remove_all(old, ignored);
    return;
  }
  base::rename(draft.temporary, draft.target);
  base::sync(parent_of(draft.target));
}

void remove_old(const Draft& draft) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(draft.target, ignored)) {
    const std::string name = entry.path().filename().string();
    if (is_ours(name) && name != kIndexName && name.find(draft.nonce) == std::string::npos) fs::remove(entry.path(), ignored);
  }
}

void discard(const Draft& draft) noexcept {
  std::error_code ignored;
  fs::remove_all(draft.temporary, ignored);
  fs::remove_all(renamed(draft), ignored);
  if (!draft.in_place || !draft.directory) return;
  for (const fs::directory_entry& entry : fs::directory_iterator(draft.target, ignored)) {
    if (entry.path().filename().string().find(draft.nonce) != std::string::npos) fs::remove(entry.path(), ignored);
  }
}

}  // namespace shardow::file
