// The protocol of a save; the numbered steps are those of docs/durability.md.
#include <chrono>
#include <random>

#include "base/errors.h"
#include "file/index.h"
#include "file/layout.h"
#include "file/plan.h"
#include "file/publish.h"
#include "file/together.h"
#include "file/wire.h"
#include "file/writer.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

using base::fail;
using Clock = std::chrono::steady_clock;

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
