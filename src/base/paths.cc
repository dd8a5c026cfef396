#include "base/paths.h"

#include <cerrno>

#include "base/errors.h"

namespace shardow::base {
namespace {

std::optional<Found> look(const Path& path, bool follow) {
  check_path(path);
  Found found{};
  const int result =
      follow ? syscalls().stat(path.c_str(), &found.status) : syscalls().lstat(path.c_str(), &found.status);
  if (result == 0) return found;
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  fail_io(errno, path, "cannot be looked at");
}

}  // namespace

std::optional<Found> look_at(const Path& path) {
  return look(path, true);
}
std::optional<Found> look_at_itself(const Path& path) {
  return look(path, false);
}
bool leads_to_directory(const Path& path) {
  const std::optional<Found> found = look_at(path);
  return found && found->directory();
}

std::vector<std::string> names_in(const Path& directory) {
  std::vector<std::string> names;
  check_path(directory);
  const auto list = [&] { return syscalls().list(directory.c_str(), &names) == 0; };
  if (list() || (make_room(errno) && list())) return names;
  if (errno == ENOENT || errno == ENOTDIR) return {};
  fail_io(errno, directory, "cannot be listed");
}

void make_directory(const Path& path) {
  if (syscalls().mkdir(path.c_str(), 0777) != 0) fail_io(errno, path, "cannot make the directory");
}

void make_directories(const Path& path) {
  if (path.empty()) return;
  if (const auto found = look_at(path)) {
    if (!found->directory())
      fail(Code::kInvalidArgument, "{} is no directory; no checkpoint can be saved in it", path.string());
    return;
  }
  const Path above = parent_of(path);
  make_directories(above);
  if (syscalls().mkdir(path.c_str(), 0777) != 0) {
    if (errno == EEXIST && leads_to_directory(path)) return;  // somebody else's, made just now
    fail_io(errno, path, "cannot make the directory");
  }
  sync(above);
}

bool link(const Path& from, const Path& to) {
  if (syscalls().link(from.c_str(), to.c_str()) == 0) return true;
  if (syscalls().left_one()) fail_io(errno, to, "cannot be linked");
  return false;
}

void remove_file(const Path& path) {
  if (syscalls().unlink(path.c_str()) != 0 && errno != ENOENT) fail_io(errno, path, "cannot be removed");
}

void remove_directory(const Path& path) {
  if (syscalls().rmdir(path.c_str()) != 0) fail_io(errno, path, "cannot be removed");
}

void remove_tree(const Path& path) noexcept {
  try {
    const std::optional<Found> found = look_at_itself(path);
    if (!found) return;
    if (!found->directory()) return remove_file(path);
    for (const std::string& name : names_in(path)) {
      if (const auto in = look_at_itself(path / name); in && !in->directory()) remove_file(path / name);
    }
    remove_directory(path);
  } catch (const Error&) {  // it stays
  } catch (const std::exception&) {
  }
}

Path parent_of(const Path& path) {
  return path.has_parent_path() ? path.parent_path() : Path(".");
}

}  // namespace shardow::base
