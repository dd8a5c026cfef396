#include "cli/whole_text.h"

#include <fmt/format.h>
#include <unistd.h>

#include "base/files.h"
#include "base/paths.h"

namespace shardow::cli {

void write_text(const std::filesystem::path& path, std::string_view text) {
  const base::Path draft = base::parent_of(path) / fmt::format(".{}.{}.tmp", path.filename().string(), ::getpid());
  base::remove_file(draft);  // of a dead process with this number
  base::File file = base::File::create(draft);
  try {
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

}  // namespace shardow::cli
