// The public face of a catalog: everything here is a look into it, or a read by it.
#include <utility>

#include "base/errors.h"
#include "file/catalog.h"
#include "file/layout.h"
#include "file/load.h"
#include "shardow/checkpoint.h"

namespace shardow {

using std::chrono::milliseconds;

Checkpoint Checkpoint::open(const std::filesystem::path& path) {
  return open(*solo(), path, milliseconds(0));  // nobody is waited for
}

std::vector<Checkpoint> Checkpoint::open_files(const std::filesystem::path& directory,
                                               const std::vector<std::string>& names) {
  return open_files(*solo(), directory, names, milliseconds(0));
}

Checkpoint Checkpoint::open(Group& group, const std::filesystem::path& path, milliseconds timeout) {
  return file::Inside::make(file::share_catalogs(group, path, {}, timeout).front());
}

std::vector<Checkpoint> Checkpoint::open_files(Group& group, const std::filesystem::path& directory,
                                               const std::vector<std::string>& names, milliseconds timeout) {
  std::vector<Checkpoint> found;
  for (auto& one : file::share_catalogs(group, directory, names, timeout))
    found.push_back(file::Inside::make(std::move(one)));
  return found;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const file::Stored& one : catalog_->tensors) names.push_back(one.entry.name);
  return names;
}

bool Checkpoint::contains(std::string_view name) const {
  return catalog_->tensors.find(name) != nullptr;
}

StoredTensor Checkpoint::tensor(std::string_view name) const {
  const auto& [file, entry, crc] = catalog_->find(name);
  return {entry.dtype, entry.shape, entry.end - entry.begin, file, crc};
}

const std::map<std::string, std::string>& Checkpoint::metadata() const {
  return catalog_->metadata();
}

std::vector<StoredFile> Checkpoint::files() const {
  std::vector<StoredFile> files;
  for (const file::Catalog::Source& one : catalog_->files) files.push_back({one.file->path(), one.metadata});
  return files;
}

void Checkpoint::read(std::string_view name, int64_t begin, int64_t end, std::span<std::byte> memory) const {
  const file::Entry& entry = catalog_->find(name).entry;
  const Region all = Region::whole(entry.shape);
  if (begin < 0 || begin > end || end > all.size())
    base::fail(Code::kInvalidArgument, "{}: '{}' has {} elements; [{}, {}) are not among them", catalog_->path, name,
               all.size(), begin, end);
  if (const int64_t bytes = file::bytes_of(end, entry) - file::bytes_of(begin, entry);
      bytes != static_cast<int64_t>(memory.size()))
    base::fail(Code::kInvalidArgument, "{}: elements [{}, {}) of '{}' have {} bytes, the memory for them {}",
               catalog_->path, begin, end, name, bytes, memory.size());
  read({entry.name, entry.dtype, all.window(begin, end), memory.data()});
}

void Checkpoint::read(const TensorView& view) const {
  file::read_one(*catalog_, view);
}

}  // namespace shardow
