#include "file/output.h"

#include <cerrno>
#include <utility>

#include "base/errors.h"
#include "base/machine.h"

namespace shardow::file {

Output::Output(const Layout& layout, const Target& target, bool checksums, bool early)
    : layout_(layout),
      target_(target),
      checksums_(checksums),
      early_(early),
      crcs_(layout.tensors().size(), 0),
      files_(layout.files().size()),
      begun_(layout.files().size(), false) {}

void Output::count(size_t tensor, int64_t begin, std::span<const std::byte> data) {
  if (!checksums_) return;
  if (counted_ != tensor || begin < sum_.end()) crcs();
  counted_ = tensor;
  sum_.add(begin, data);
}

std::vector<uint64_t>& Output::crcs() {
  if (counted_) {
    const Entry& entry = layout_.place(*counted_).entry;
    crcs_[*counted_] ^= sum_.take(entry.end - entry.begin);
    counted_.reset();
  }
  return crcs_;
}

void Output::write(size_t tensor, int64_t begin, std::span<const std::byte> data) {
  constexpr size_t kShort = size_t{64} << 10, kTogether = size_t{1} << 20;
  const Place place = layout_.place(tensor);
  const FilePlan& plan = layout_.files()[place.file];
  if (!files_[place.file]) keep(place.file, made_by_first(base::File::open_for_writing, plan.name));
  const int64_t at = plan.data_begin + place.entry.begin + begin;
  written_ += static_cast<int64_t>(data.size());
  const bool follows = pending_file_ == place.file && pending_at_ + static_cast<int64_t>(pending_.size()) == at;
  if (!follows || data.size() >= kShort || pending_.size() + data.size() > kTogether) flush();
  if (data.size() >= kShort) {
    files_[place.file]->write(data, at);
    if (early_) files_[place.file]->begin_writing(at, static_cast<int64_t>(data.size()));
    return;
  }
  if (pending_.empty()) {
    pending_file_ = place.file;
    pending_at_ = at;
  }
  pending_.insert(pending_.end(), data.begin(), data.end());
}

void Output::flush() {
  if (!pending_.empty()) files_[pending_file_]->write(pending_, pending_at_);
  pending_.clear();
}

/// Of a file that rank 0 made, or the directory of which it made.
base::File Output::made_by_first(base::File (*open)(const base::Path&), const std::string& name) const {
  try {
    return open(target_.file(name));
  } catch (const Error& error) {
    if (error.code() != Code::kNotFound) throw;
    throw Error(Code::kIo,
                fmt::format("{}: rank 0 has made it on {}, and it is not there on {}: the path is not on storage that "
                            "all machines share. "
                            "Nothing was published",
                            target_.file(name).string(), target_.host, base::host_name()),
                ENOENT);
  }
}

void Output::begin_file(size_t file) {
  if (begun_[file]) return;
  begun_[file] = true;
  const FilePlan& plan = layout_.files()[file];
  const std::string header = header_bytes(plan.entries, plan.metadata, plan.data_begin);
  keep(file, made_by_first(base::File::replace, plan.name)).write(std::as_bytes(std::span(header)), 0);
}

/// Flushes and closes those that were opened the longest ago where there are many.
base::File& Output::keep(size_t file, base::File opened) {
  constexpr size_t kMostOpen = 32;
  flush();
  while (open_.size() >= kMostOpen) {
    auto& oldest = files_[open_.front()];
    oldest->sync();
    oldest->close();
    oldest.reset();
    open_.pop_front();
  }
  files_[file] = std::make_unique<base::File>(std::move(opened));
  open_.push_back(file);
  return *files_[file];
}

void Output::add(Output& other) {
  for (size_t t = 0; t < crcs().size(); ++t) crcs_[t] ^= other.crcs()[t];
  written_ += other.written_;
}

void Output::finish() {
  flush();
  for (auto& file : files_) {
    if (!file) continue;
    file->sync();
    file->close();
  }
}

}  // namespace shardow::file
