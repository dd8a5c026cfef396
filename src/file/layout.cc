#include "file/layout.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "file/index.h"
#include "file/json.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

DType saved_dtype(const Shared& tensor, const SaveOptions& options) {
  return options.dtype && is_floating(tensor.dtype) ? *options.dtype : tensor.dtype;
}

}  // namespace

std::string checksum_text(const FilePlan& file, const std::vector<Shared>& tensors, const std::vector<uint64_t>& crcs) {
  std::string out = "{";
  for (const size_t t : file.tensors) {
    if (out.size() > 1) out += ',';
    append_json_text(out, tensors[t].name);
    out += fmt::format(":\"{:08x}\"", crcs[t]);
  }
  return out + "}";
}

int64_t bytes_of(int64_t elements, const Entry& entry) {
  const int64_t bits = elements * dtype_bits(entry.dtype);
  if (bits % 8 != 0)
    base::fail(Code::kUnsupported, "'{}' is cut inside a byte of its {} elements; shard it elsewhere", entry.name, dtype_name(entry.dtype));
  return bits / 8;
}

Layout::Layout(const std::vector<Shared>& tensors, const SaveOptions& options) : places_(tensors.size()) {
  std::vector<Entry> entries;
  for (const Shared& tensor : tensors) entries.push_back({tensor.name, saved_dtype(tensor, options), tensor.shape, 0, 0});
  const Header order = lay_out(std::move(entries), {});
  for (const Entry& entry : order.entries) {
    const int64_t bytes = entry.end - entry.begin;
    if (files_.empty() || (options.max_shard_size > 0 && size_ > 0 && size_ + bytes > options.max_shard_size)) {
      files_.emplace_back();
      size_ = 0;
    }
    const auto found = std::lower_bound(tensors.begin(), tensors.end(), entry.name,
                                        [](const Shared& a, const std::string& name) { return a.name < name; });
    files_.back().tensors.push_back(static_cast<size_t>(found - tensors.begin()));
    size_ += bytes;
    total_ += bytes;
  }
  if (files_.empty()) files_.emplace_back();
  fill(tensors, options);
}

void Layout::fill(const std::vector<Shared>& tensors, const SaveOptions& options) {
  const std::vector<uint64_t> zeros(tensors.size(), 0);
  for (size_t f = 0; f < files_.size(); ++f) {
    FilePlan& file = files_[f];
    file.name = shard_name(f, files_.size());
    std::vector<Entry> entries;
    for (const size_t t : file.tensors) entries.push_back({tensors[t].name, saved_dtype(tensors[t], options), tensors[t].shape, 0, 0});
    Metadata metadata = options.metadata;
    metadata.try_emplace("format", "pt");
    if (options.checksums) metadata[kChecksums] = checksum_text(file, tensors, zeros);
    file.header = lay_out(std::move(entries), std::move(metadata));
    for (size_t i = 0; i < file.tensors.size(); ++i) places_[file.tensors[i]] = {f, file.header.entries[i]};
  }
}

}  // namespace shardow::file
