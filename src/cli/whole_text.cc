// As `cp` and `sort -o` treat what is there: a link leads to what is written, a FIFO or a device is written to, a file
// keeps its mode. A regular file is replaced, so that a reader, or who finds it after a crash, has the old text or the
// new one.
#include "cli/whole_text.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>

#include "base/errors.h"
#include "base/files.h"
#include "base/paths.h"
#include "cli/terminal.h"

namespace shardow::cli {
namespace {

/// What a link leads to, also where nothing is there yet; a path that is none as it is.
base::Path behind_links(base::Path path) {
  constexpr int kMostLinks = 40;  // the kernel's
  for (int i = 0; i < kMostLinks; ++i) {
    const auto found = base::look_at_itself(path);
    if (!found || !found->link()) return path;
    path = base::parent_of(path) / base::in_our_words([&] { return std::filesystem::read_symlink(path); });
  }
  base::fail_io(ELOOP, path, "cannot be written");
}

/// A device, or a FIFO, which waits for a reader.
void write_into(const base::Path& path, std::string_view text) {
  int fd = -1;
  while ((fd = ::open(path.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC)) < 0) {
    if (errno != EINTR) base::fail_io(errno, path, "cannot be written");
    check_interrupted();
  }
  const int error = write_all(fd, text);
  const bool closed = ::close(fd) == 0;
  if (error == EPIPE) throw ClosedPipe{};
  if (error != 0 || !closed) base::fail_io(error != 0 ? error : errno, path, "cannot be written");
}

void replace(const base::Path& path, std::string_view text, const std::optional<base::Found>& found) {
  const std::string name = path.filename().string().substr(0, 200);  // room for what is added to it
  const base::Path draft = base::parent_of(path) / fmt::format(".{}.{}.tmp", name, ::getpid());
  base::remove_file(draft);  // of a dead process with this number
  base::File file = base::File::create(draft);
  try {
    if (found && ::chmod(draft.c_str(), found->status.st_mode & 0777) != 0)
      base::fail_io(errno, draft, "cannot have the mode of the file");
    file.write(std::as_bytes(std::span(text)), 0);
    file.sync();
    file.close();
    base::rename(draft, path);
  } catch (...) {
    base::remove_file(draft);
    throw;
  }
  base::sync(base::parent_of(path));
}

}  // namespace

bool is_standard_output(const std::filesystem::path& path) {
  const auto found = base::look_at(path);
  struct stat ours {};
  return found && !S_ISCHR(found->status.st_mode) && ::fstat(STDOUT_FILENO, &ours) == 0 &&
         found->same(base::Found{ours});
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  base::check_path(path);
  if (is_standard_output(path)) return put(text);
  const auto found = base::look_at(path);
  if (!found || found->regular()) return replace(behind_links(path), text, found);
  if (found->directory()) base::fail_io(EISDIR, path, "cannot be written");
  if (!S_ISCHR(found->status.st_mode) && !S_ISFIFO(found->status.st_mode))
    base::fail(Code::kInvalidArgument, "{} is a block device or a socket; name a file", path.string());
  write_into(path, text);
}

}  // namespace shardow::cli
