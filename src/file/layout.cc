#include "file/layout.h"

#include <iterator>
#include <utility>

#include "base/errors.h"
#include "file/index.h"
#include "file/json.h"
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

/// Bytes of a header that a tensor takes, with its checksum; more than that unless its name is full of control characters.
int64_t about_text(const Entry& entry) {
  return 3 * static_cast<int64_t>(entry.name.size()) + 20 * static_cast<int64_t>(entry.shape.size()) + 160;
}

}  // namespace

int64_t bytes_of(int64_t elements, const Entry& entry) {
  const int64_t bits = elements * dtype_bits(entry.dtype);
  if (bits % 8 != 0)
    base::fail(Code::kUnsupported, "'{}' is cut inside a byte of its {} elements; shard it elsewhere", entry.name, dtype_name(entry.dtype));
  return bits / 8;
}

Layout::Layout(std::vector<Volume> volumes, const SaveOptions& options) {
  for (Volume& volume : volumes) add(std::move(volume), options);
}

void Layout::add(Volume volume, const SaveOptions& options) {
  std::vector<Entry> entries;
  for (const Shared& tensor : volume.tensors) {
    check_bytes(tensor);
    entries.push_back(entry_for(tensor, options));
  }
  const size_t first_file = files_.size(), first_tensor = tensors_.size();
  int64_t size = 0, text = 0;
  files_.emplace_back();
  for (const Entry& entry : in_file_order(std::move(entries))) {
    const int64_t bytes = entry.end - entry.begin, described = about_text(entry);
    const bool full = size > 0 && size + bytes > options.max_shard_size;
    if (options.max_shard_size > 0 && !files_.back().tensors.empty() && (full || text + described > kMostHeaderBytes / 2)) {
      files_.emplace_back();
      size = text = 0;
    }
    text += described;
    files_.back().tensors.push_back(first_tensor + *find(volume.tensors, entry.name));
    size += bytes;
    total_ += bytes;
  }
  std::move(volume.tensors.begin(), volume.tensors.end(), std::back_inserter(tensors_));
  places_.resize(tensors_.size());
  const size_t count = files_.size() - first_file;
  for (size_t f = 0; f < count; ++f) {
    files_[first_file + f].name = volume.file.empty() ? shard_name(f, count) : volume.file;
    fill(files_[first_file + f], first_file + f, volume.metadata, options);
  }
}

void Layout::fill(FilePlan& file, size_t index, const Metadata& metadata, const SaveOptions& options) {
  std::vector<Entry> entries;
  for (const size_t t : file.tensors) entries.push_back(entry_for(tensors_[t], options));
  Metadata all = metadata;
  all.try_emplace("format", "pt");
  if (options.checksums) all[kChecksums] = checksum_text(file, std::vector<uint64_t>(tensors_.size(), 0));
  file.header = lay_out(std::move(entries), std::move(all));
  for (size_t i = 0; i < file.tensors.size(); ++i) places_[file.tensors[i]] = {index, file.header.entries[i]};
}

std::vector<Owned> Layout::owners(size_t tensor, std::optional<int> rank) const {
  constexpr int64_t kTurnBytes = int64_t{1} << 20;
  const Place& place = places_[tensor];
  return file::owners(tensors_[tensor], place.file + static_cast<size_t>(place.entry.begin / kTurnBytes), rank);
}

void Layout::set_checksums(const std::vector<uint64_t>& crcs) {
  for (FilePlan& file : files_) file.header.metadata[kChecksums] = checksum_text(file, crcs);
}

void Layout::rename_files(const std::string& nonce) {
  for (size_t f = 0; f < files_.size(); ++f)
    files_[f].name = fmt::format("model-{}-{:05}-of-{:05}.safetensors", nonce, f + 1, files_.size());
}

/// {"name":"01234567",...}: of fixed width, so that the header's length is known before the data.
std::string Layout::checksum_text(const FilePlan& file, const std::vector<uint64_t>& crcs) const {
  std::string out = "{";
  for (const size_t t : file.tensors) {
    if (out.size() > 1) out += ',';
    append_json_text(out, tensors_[t].name);
    out += fmt::format(":\"{:08x}\"", crcs[t]);
  }
  return out + "}";
}

}  // namespace shardow::file
