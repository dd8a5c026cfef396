#include "file/layout.h"

#include <utility>

#include "base/errors.h"
#include "base/version.h"
#include "file/index.h"
#include "file/json.h"
#include "file/names.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

Entry entry_for(const Shared& tensor, const SaveOptions& options) {
  return {tensor.name, options.dtype && is_floating(tensor.dtype) ? *options.dtype : tensor.dtype, tensor.shape, 0, 0};
}

/// Pieces of F4 and F6 begin and end between bytes, or are refused before anything is written.
void check_bytes(const Shared& tensor) {
  const int bits = dtype_bits(tensor.dtype);
  if (bits % 8 == 0) return;
  const Entry entry{tensor.name, tensor.dtype, tensor.shape, 0, 0};
  for (const Shared::Piece& piece : tensor.pieces) {
    piece.region.for_each_run([&](const Run& run) {
      bytes_of(run.global_begin, entry);
      bytes_of(run.length, entry);
    });
  }
}

/// Bytes of a header that a tensor takes, with its checksum; more than that unless its name is full of control
/// characters.
int64_t about_text(const Entry& entry) {
  return 3 * static_cast<int64_t>(entry.name.size()) + 20 * static_cast<int64_t>(entry.shape.size()) + 160;
}

}  // namespace

int64_t bytes_of(int64_t elements, const Entry& entry) {
  const int64_t bits = elements * dtype_bits(entry.dtype);
  if (bits % 8 != 0)
    base::fail(Code::kUnsupported, "'{}' is cut inside a byte of its {} elements; shard it elsewhere", entry.name,
               dtype_name(entry.dtype));
  return bits / 8;
}

Arrangement::Arrangement(const std::vector<Volume>& volumes, const SaveOptions& options) {
  std::vector<Shared> joined;
  for (const Volume& volume : volumes) {
    first_.push_back(places_.size());
    places_.resize(places_.size() + volume.tensors->size());
    if (volumes.size() > 1) joined.insert(joined.end(), volume.tensors->begin(), volume.tensors->end());
  }
  tensors_ = volumes.size() == 1 ? volumes[0].tensors : std::make_shared<const std::vector<Shared>>(std::move(joined));
  for (size_t v = 0; v < volumes.size(); ++v) add(v, volumes[v].file, *volumes[v].tensors, options);
}

void Arrangement::add(size_t volume, const std::string& name, const std::vector<Shared>& tensors,
                      const SaveOptions& options) {
  std::vector<Entry> entries;
  for (const Shared& tensor : tensors) {
    check_bytes(tensor);
    entries.push_back(entry_for(tensor, options));
  }
  const size_t first_file = files_.size();
  files_.push_back({{}, volume, {}, {}});
  int64_t size = 0, text = 0, begin = 0;
  Finder finder(tensors);
  for (Entry& entry : in_file_order(std::move(entries))) {
    const int64_t bytes = entry.end - entry.begin, described = about_text(entry);
    const bool full = size > 0 && size + bytes > options.max_shard_size;
    if (options.max_shard_size > 0 && !files_.back().tensors.empty() &&
        (full || text + described > kMostHeaderBytes / 2)) {
      files_.push_back({{}, volume, {}, {}});
      size = text = 0;
      begin = entry.begin;
    }
    File& file = files_.back();
    const size_t tensor = first_[volume] + *finder.find(entry.name);
    places_[tensor] = {files_.size() - 1, file.entries.size()};
    file.tensors.push_back(tensor);
    entry.begin -= begin;
    entry.end -= begin;
    file.entries.push_back(std::move(entry));
    text += described;
    size += bytes;
    total_ += bytes;
  }
  const size_t count = files_.size() - first_file;
  for (size_t f = 0; f < count; ++f) {
    files_[first_file + f].name = name.empty() ? shard_name(f, count) : name;
    measure(files_[first_file + f], options.checksums);
  }
}

void Arrangement::measure(File& file, bool checksums) const {
  file.entries_length = entries_length(file.entries);
  if (!checksums) return;
  std::string text;
  append_json_text(text, kChecksums);
  text += ":,";
  append_json_text(text, checksum_text(file, {}));
  file.checksums_length = static_cast<int64_t>(text.size());
}

std::vector<Owned> Arrangement::owners(size_t tensor, std::optional<int> rank) const {
  constexpr int64_t kTurnBytes = int64_t{1} << 20;
  const Place place = this->place(tensor);
  return file::owners(tensors()[tensor], place.file + static_cast<size_t>(place.entry.begin / kTurnBytes), rank);
}

std::string Arrangement::checksum_text(const File& file, const std::vector<uint64_t>& crcs) const {
  std::string out = "{";
  for (const size_t t : file.tensors) {
    if (out.size() > 1) out += ',';
    append_json_text(out, tensors()[t].name);
    out += fmt::format(":\"{:08x}\"", crcs.empty() ? 0 : crcs[t]);
  }
  return out + "}";
}

Layout::Layout(std::shared_ptr<const Arrangement> arrangement, const std::vector<Metadata>& metadata)
    : arrangement_(std::move(arrangement)) {
  for (const Arrangement::File& file : arrangement_->files()) {
    FilePlan& plan = files_.emplace_back(FilePlan{file.name, file, metadata.at(file.volume), 0});
    plan.metadata.try_emplace("format", "pt");
    plan.metadata[kWrittenBy] = base::version();
    plan.data_begin = data_begin(file.entries.size(), file.entries_length + file.checksums_length, plan.metadata);
  }
}

void Layout::set_checksums(const std::vector<uint64_t>& crcs) {
  for (FilePlan& file : files_) file.metadata[kChecksums] = arrangement_->checksum_text(file.content, crcs);
}

void Layout::rename_files(const std::string& nonce) {
  for (size_t f = 0; f < files_.size(); ++f)
    files_[f].name = name_with_nonce(files_[f].content.name, nonce, f, files_.size());
}

}  // namespace shardow::file
