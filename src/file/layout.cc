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

Layout::Layout(const std::vector<Volume>& volumes, const SaveOptions& options) {
  std::vector<Shared> joined;
  for (const Volume& volume : volumes) {
    first_.push_back(places_.size());
    places_.resize(places_.size() + volume.tensors->size());
    if (volumes.size() > 1) joined.insert(joined.end(), volume.tensors->begin(), volume.tensors->end());
  }
  tensors_ = volumes.size() == 1 ? volumes[0].tensors : std::make_shared<const std::vector<Shared>>(std::move(joined));
  for (size_t v = 0; v < volumes.size(); ++v) add(first_[v], volumes[v], options);
}

/// `first`: the index of the volume's first tensor.
void Layout::add(size_t first, const Volume& volume, const SaveOptions& options) {
  std::vector<Entry> entries;
  for (const Shared& tensor : *volume.tensors) {
    check_bytes(tensor);
    entries.push_back(entry_for(tensor, options));
  }
  Metadata metadata = volume.metadata;
  metadata.try_emplace("format", "pt");
  metadata[kWrittenBy] = base::version();
  const size_t first_file = files_.size();
  files_.push_back({volume.file, volume.file, metadata});
  int64_t size = 0, text = 0, begin = 0;
  Finder finder(*volume.tensors);
  for (Entry& entry : in_file_order(std::move(entries))) {
    const int64_t bytes = entry.end - entry.begin, described = about_text(entry);
    const bool full = size > 0 && size + bytes > options.max_shard_size;
    if (options.max_shard_size > 0 && !files_.back().tensors.empty() &&
        (full || text + described > kMostHeaderBytes / 2)) {
      files_.push_back({volume.file, volume.file, metadata});
      size = text = 0;
      begin = entry.begin;
    }
    FilePlan& file = files_.back();
    const size_t tensor = first + *finder.find(entry.name);
    places_[tensor] = {files_.size() - 1, file.entries.size()};
    file.tensors.push_back(tensor);
    entry.begin -= begin;
    entry.end -= begin;
    file.entries.push_back(std::move(entry));
    text += described;
    size += bytes;
    total_ += bytes;
  }
  for (size_t f = first_file; f < files_.size(); ++f) {
    FilePlan& file = files_[f];
    if (volume.file.empty()) file.name = file.asked = shard_name(f - first_file, files_.size() - first_file);
    std::string checksums;
    if (options.checksums) {
      append_json_text(checksums, kChecksums);
      checksums += ":,";
      append_json_text(checksums, checksum_text(file, {}));
    }
    file.data_begin = data_begin(file.entries.size(),
                                 entries_length(file.entries) + static_cast<int64_t>(checksums.size()), file.metadata);
  }
}

std::vector<Owned> Layout::owners(size_t tensor, std::optional<int> rank) const {
  constexpr int64_t kTurnBytes = int64_t{1} << 20;
  const Place place = this->place(tensor);
  return file::owners(tensors()[tensor], place.file + static_cast<size_t>(place.entry.begin / kTurnBytes), rank);
}

/// {"name":"01234567",...}: of fixed width, so that the header's length is known before the data: of zeros where there
/// are no `crcs`.
std::string Layout::checksum_text(const FilePlan& file, const std::vector<uint64_t>& crcs) const {
  std::string out = "{";
  for (const size_t t : file.tensors) {
    if (out.size() > 1) out += ',';
    append_json_text(out, tensors()[t].name);
    out += fmt::format(":\"{:08x}\"", crcs.empty() ? 0 : crcs[t]);
  }
  return out + "}";
}

void Layout::set_checksums(const std::vector<uint64_t>& crcs) {
  for (FilePlan& file : files_) file.metadata[kChecksums] = checksum_text(file, crcs);
}

void Layout::rename_files(const std::string& nonce) {
  for (size_t f = 0; f < files_.size(); ++f) files_[f].name = name_with_nonce(files_[f].asked, nonce, f, files_.size());
}

}  // namespace shardow::file
