// The numbered steps are those of docs/durability.md.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>

#include "base/errors.h"
#include "file/crc.h"
#include "file/header.h"
#include "file/index.h"
#include "file/json.h"
#include "file/plan.h"
#include "file/publish.h"
#include "file/together.h"
#include "file/wire.h"
#include "kernels/kernels.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

using base::fail;
using Clock = std::chrono::steady_clock;

constexpr int64_t kChunkBytes = int64_t{8} << 20;
constexpr std::chrono::milliseconds kPart{500};  // how long a rank writes before it tells the others
constexpr const char* kChecksums = "shardow.crc32";

/// A file of the checkpoint, and which tensors (indices into what exchange() gave) are its entries.
struct FilePlan {
  std::string name;
  Header header;
  std::vector<size_t> tensors;
};

struct Place {
  size_t file;
  Entry entry;
};

DType saved_dtype(const Shared& tensor, const SaveOptions& options) {
  return options.dtype && is_floating(tensor.dtype) ? *options.dtype : tensor.dtype;
}

/// {"name":"01234567",...}: of fixed width, so that the header's length is known before the data.
std::string checksum_text(const FilePlan& file, const std::vector<Shared>& tensors, const std::vector<uint64_t>& crcs) {
  std::string out = "{";
  for (const size_t t : file.tensors) {
    if (out.size() > 1) out += ',';
    append_json_text(out, tensors[t].name);
    out += fmt::format(":\"{:08x}\"", crcs[t]);
  }
  return out + "}";
}

class Layout {
 public:
  Layout(const std::vector<Shared>& tensors, const SaveOptions& options) : places_(tensors.size()) {
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

  std::vector<FilePlan>& files() { return files_; }
  const Place& place(size_t tensor) const { return places_[tensor]; }
  int64_t total() const { return total_; }

 private:
  void fill(const std::vector<Shared>& tensors, const SaveOptions& options) {
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

  std::vector<FilePlan> files_;
  std::vector<Place> places_;
  int64_t size_ = 0, total_ = 0;
};

/// This rank's bytes, chunk by chunk.
class Writer {
 public:
  Writer(std::span<const TensorView> views, std::vector<Owned> owned, Layout& layout, const Draft& draft, bool checksums, size_t tensors)
      : views_(views),
        owned_(std::move(owned)),
        layout_(layout),
        draft_(draft),
        checksums_(checksums),
        crcs_(tensors, 0),
        files_(layout.files().size()) {}

  /// Half a second's work.
  Part part() {
    const auto begin = Clock::now();
    const int64_t before = written_;
    while (next_ < owned_.size() || left_ > 0) {
      if (left_ == 0 && !next_run()) continue;
      if (left_ > 0) chunk();
      if (Clock::now() - begin > kPart) break;
    }
    return {written_ - before, next_ == owned_.size() && left_ == 0 && !runs_};
  }

  void finish() {
    for (auto& file : files_) {
      if (!file) continue;
      file->sync();
      file->close();
    }
  }

  std::vector<uint64_t>& crcs() { return crcs_; }
  int64_t written() const { return written_; }

 private:
  /// Moves on to the next run, and to the next tensor after the last one. False if there was none here.
  bool next_run() {
    if (!runs_) runs_ = std::make_unique<RunCursor>(owned_[next_].region);
    const auto run = runs_->next();
    if (!run) {
      runs_.reset();
      ++next_;
      return false;
    }
    const Owned& mine = owned_[next_];
    global_ = run->global_begin;
    local_ = mine.local_begin + run->local_begin;
    left_ = run->length;
    return true;
  }

  void chunk() {
    const Owned& mine = owned_[next_];
    const TensorView& view = views_[mine.view];
    const Place& place = layout_.place(mine.tensor);
    const int64_t bits = dtype_bits(place.entry.dtype);
    const int64_t count = std::min(left_, kChunkBytes * 8 / bits / 16 * 16);
    const int64_t begin = bytes_of(global_, place.entry), bytes = bytes_of(global_ + count, place.entry) - begin;
    const std::span<const std::byte> data(source(view, place.entry.dtype, count), static_cast<size_t>(bytes));
    file(place.file).write(data, layout_.files()[place.file].header.data_begin + place.entry.begin + begin);
    if (checksums_) crcs_[mine.tensor] ^= crc32_contribution(crc32(0, data), place.entry.end - place.entry.begin - begin - bytes);
    written_ += bytes;
    global_ += count;
    local_ += count;
    left_ -= count;
  }

  static int64_t bytes_of(int64_t elements, const Entry& entry) {
    const int64_t bits = elements * dtype_bits(entry.dtype);
    if (bits % 8 != 0)
      fail(Code::kUnsupported, "'{}' is cut inside a byte of its {} elements; shard it elsewhere", entry.name, dtype_name(entry.dtype));
    return bits / 8;
  }

  const std::byte* source(const TensorView& view, DType dtype, int64_t count) {
    const std::byte* data = static_cast<const std::byte*>(view.data) + local_ * dtype_bits(view.dtype) / 8;
    if (view.dtype == dtype) return data;
    buffer_.resize(static_cast<size_t>(kChunkBytes));
    kernels::cpu::cast(data, view.dtype, buffer_.data(), dtype, count);
    return buffer_.data();
  }

  base::File& file(size_t index) {
    auto& file = files_[index];
    if (!file) file = std::make_unique<base::File>(base::File::open_for_writing(draft_.file(layout_.files()[index].name)));
    return *file;
  }

  std::span<const TensorView> views_;
  std::vector<Owned> owned_;
  Layout& layout_;
  const Draft& draft_;
  bool checksums_;
  std::vector<uint64_t> crcs_;
  std::vector<std::unique_ptr<base::File>> files_;
  std::vector<std::byte> buffer_;
  std::unique_ptr<RunCursor> runs_;  // of owned_[next_]
  size_t next_ = 0;
  int64_t global_ = 0, local_ = 0, left_ = 0;  // of the current run
  int64_t written_ = 0;
};

void check_views(std::span<const TensorView> views, const SaveOptions& options) {
  if (options.dtype && !is_floating(*options.dtype))
    fail(Code::kInvalidArgument, "dtype {}: only floating tensors are cast, and to floating types", dtype_name(*options.dtype));
  if (options.max_shard_size < 0) fail(Code::kInvalidArgument, "max_shard_size {} is negative", options.max_shard_size);
  for (const TensorView& view : views) {
    if (view.device.kind != Device::Kind::kCpu)
      fail(Code::kUnsupported, "'{}' is on a CUDA device; saving from there is not built yet: save a CPU copy", view.name);
    if (options.dtype && is_floating(view.dtype) && view.dtype != *options.dtype &&
        (dtype_bits(view.dtype) < 16 || dtype_bits(*options.dtype) < 16)) {
      fail(Code::kUnsupported, "'{}' is {}; types below 16 bits are not cast", view.name, dtype_name(view.dtype));
    }
  }
}

/// The same on every rank, or kInvalidArgument on every rank. Returns rank 0's nonce.
std::string same_call(Group& group, const base::Path& path, const SaveOptions& options, Deadline deadline) {
  Sender facts;
  facts.text(path.string());
  facts.number(options.dtype ? static_cast<int64_t>(*options.dtype) : -1);
  facts.number(options.max_shard_size);
  facts.number(options.checksums ? 1 : 0);
  for (const auto& [key, text] : options.metadata) {
    facts.text(key);
    facts.text(text);
  }
  Sender mine;
  mine.text(facts.bytes());
  std::random_device random;
  mine.text(fmt::format("{:08x}{:08x}", random(), random()));
  const std::vector<std::string> all = group.all_gather(mine.bytes(), deadline);
  Receiver first(all[0]);
  const std::string expected = first.text(), nonce = first.text();
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (Receiver(all[rank]).text() != expected) {
      fail(Code::kInvalidArgument, "save(): rank {} was called with another path, dtype, max_shard_size or metadata than rank 0", rank);
    }
  }
  return nonce;
}

/// Header after byte 8, then, when that is on disk, the length: until then no reader takes the file.
void write_header(const base::Path& path, const Header& header) {
  const std::string bytes = header_bytes(header);
  const std::span<const std::byte> all = std::as_bytes(std::span(bytes));
  base::File file = base::File::open_for_writing(path);
  file.write(all.subspan(static_cast<size_t>(kLengthBytes)), kLengthBytes);
  file.sync();
  file.write(all.first(static_cast<size_t>(kLengthBytes)), 0);
  file.sync();
  file.close();
}

void write_index(const Draft& draft, Layout& layout) {
  WeightMap weights;
  for (const FilePlan& file : layout.files()) {
    for (const Entry& entry : file.header.entries) weights[entry.name] = file.name;
  }
  const std::string bytes = index_bytes(weights, layout.total());
  base::File file = base::File::create(draft.temporary / kIndexName);
  file.write(std::as_bytes(std::span(bytes)), 0);
  file.sync();
  file.close();
}

void commit(const Draft& draft, Layout& layout, const std::vector<Shared>& tensors, const std::vector<uint64_t>& crcs, bool checksums) {
  for (FilePlan& file : layout.files()) {
    if (checksums) file.header.metadata[kChecksums] = checksum_text(file, tensors, crcs);
    write_header(draft.file(file.name), file.header);
  }
  if (layout.files().size() > 1) write_index(draft, layout);
  publish(draft);
}

}  // namespace
}  // namespace file

SaveReport save(Group& group, std::span<const TensorView> views, const std::filesystem::path& path, const SaveOptions& options) {
  using namespace file;
  const auto begin = Clock::now();
  const std::chrono::milliseconds timeout = options.timeout;
  together(group, timeout, [&] { check_views(views, options); });
  const std::string nonce = same_call(group, path, options, Clock::now() + timeout);
  const std::vector<Shared> tensors = exchange(group, views, Clock::now() + timeout);  // (1)
  check_whole(tensors);
  Layout layout(tensors, options);
  const bool directory = path.extension() != ".safetensors";
  if (!directory && layout.files().size() > 1) {
    base::fail(Code::kInvalidArgument, "{}: {} files do not fit into one name; for max_shard_size give a directory", path.string(),
               layout.files().size());
  }
  const Draft draft = draft_for(path, directory, nonce);
  try {
    together(group, timeout, [&] {  // (2)
      if (group.rank() != 0) return;
      std::vector<std::pair<std::string, int64_t>> sizes;
      for (const FilePlan& file : layout.files()) sizes.emplace_back(file.name, file.header.data_begin + file.header.data_size());
      prepare(draft, sizes);
    });
    Writer writer(views, owned_by(group.rank(), tensors, views), layout, draft, options.checksums, tensors.size());
    in_parts(group, timeout, layout.total(), options.progress, [&] { return writer.part(); });  // (3)
    together(group, timeout, [&] { writer.finish(); });
    if (options.checksums) group.all_reduce(writer.crcs(), Group::Op::kXor, Clock::now() + timeout);  // (4)
    together(group, timeout, [&] {                                                                    // (5), (6)
      if (group.rank() == 0) commit(draft, layout, tensors, writer.crcs(), options.checksums);
    });
    SaveReport report;
    for (const FilePlan& file : layout.files()) report.files.push_back(directory ? draft.target / file.name : draft.target);
    report.bytes_written = writer.written();
    report.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return report;
  } catch (...) {
    if (group.rank() == 0) discard(draft);
    throw;
  }
}

}  // namespace shardow
