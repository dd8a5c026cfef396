#include "file/publish.h"

#include <algorithm>
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

/// What stands beside the old checkpoint in its directory (configuration, tokenizer) stands beside the new one, as links where the file
/// system has them.
void keep_others(const Draft& draft) {
  if (!fs::is_directory(draft.target)) return;
  for (const fs::directory_entry& entry : fs::directory_iterator(draft.target)) {
    if (is_ours(entry.path().filename().string())) continue;
    const Path to = draft.temporary / entry.path().filename();
    std::error_code error;
    constexpr auto kAll = fs::copy_options::recursive | fs::copy_options::copy_symlinks;
    fs::copy(entry.path(), to, kAll | fs::copy_options::create_hard_links, error);
    if (error) {
      fs::remove_all(to, error);
      fs::copy(entry.path(), to, kAll, error);
    }
    if (error) base::fail_io(error.value(), entry.path(), "cannot be kept beside the new checkpoint");
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

}  // namespace

Draft draft_for(const Path& target, bool directory, const std::string& nonce) {
  const Path plain = target.has_filename() ? target : target.parent_path();  // "dir/" is "dir"
  if (!plain.has_filename() || plain.filename() == "." || plain.filename() == "..")
    fail(Code::kInvalidArgument, "'{}' is no name for a checkpoint", target.string());
  return {plain, parent_of(plain) / (prefix_of(plain) + nonce + ".tmp"), directory};
}

void prepare(const Draft& draft, const std::vector<std::pair<std::string, int64_t>>& files) {
  const Path parent = parent_of(draft.target);
  std::error_code error;
  fs::create_directories(parent, error);
  if (error) base::fail_io(error.value(), parent, "cannot make the directory");
  if (!draft.directory && fs::is_directory(draft.target))
    fail(Code::kInvalidArgument, "{} is a directory; a single file is to be written there", draft.target.string());
  if (draft.directory && fs::exists(draft.target) && !fs::is_directory(draft.target)) {
    fail(Code::kInvalidArgument, "{} is a file; a directory is to be written there. Name it .safetensors for a single file",
         draft.target.string());
  }
  remove_leftovers(draft.target);
  int64_t needed = 0;
  for (const auto& [name, bytes] : files) needed += bytes;
  if (const int64_t room = base::free_bytes(parent); room < needed) {
    fail(Code::kOutOfSpace, "{}: the checkpoint takes {} bytes, {} are free; nothing was written", parent.string(), needed, room);
  }
  if (draft.directory) base::make_directory(draft.temporary);
  for (const auto& [name, bytes] : files) {
    base::File file = base::File::create(draft.file(name));
    file.set_size(bytes);
    file.close();
  }
}

void publish(const Draft& draft) {
  if (draft.directory) keep_others(draft);
  if (draft.directory) base::sync_directory(draft.temporary);
  if (draft.directory && fs::exists(draft.target)) {
    if (base::exchange(draft.temporary, draft.target)) {
      base::sync_directory(parent_of(draft.target));
      discard(draft);  // what was there before
      return;
    }
    // Without an exchange there is an instant without a checkpoint under its name; the old one is beside it until the new one is there.
    Path old = draft.temporary;
    old += ".old.tmp";
    base::rename(draft.target, old);
    base::rename(draft.temporary, draft.target);
    base::sync_directory(parent_of(draft.target));
    std::error_code ignored;
    fs::remove_all(old, ignored);
    return;
  }
  base::rename(draft.temporary, draft.target);
  base::sync_directory(parent_of(draft.target));
}

void discard(const Draft& draft) noexcept {
  std::error_code ignored;
  fs::remove_all(draft.temporary, ignored);
}

}  // namespace shardow::file
