#include "file/call.h"

#include <unistd.h>

#include <random>
#include <set>

#include "base/errors.h"
#include "base/files.h"
#include "file/header.h"
#include "file/wire.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using base::fail;

void check_options(std::span<const SaveFile> files, const SaveOptions& options) {
  if (options.dtype && !is_floating(*options.dtype))
    fail(Code::kInvalidArgument, "dtype {}: only floating tensors are cast, and to floating types", dtype_name(*options.dtype));
  if (options.max_shard_size < 0) fail(Code::kInvalidArgument, "max_shard_size {} is negative", options.max_shard_size);
  std::set<std::string> names;
  for (const SaveFile& file : files) {
    const bool plain = base::Path(file.name).filename() == file.name && file.name.ends_with(".safetensors");
    if (!file.name.empty() && (!plain || !names.insert(file.name).second))
      fail(Code::kInvalidArgument, "'{}' is no name for one of several files: a plain one that ends in .safetensors, once", file.name);
  }
  if (options.max_shard_size > 0 && !names.empty())
    fail(Code::kInvalidArgument, "max_shard_size splits one file; {} are given", files.size());
}

void check_views(std::span<const SaveFile> files, const SaveOptions& options) {
  for (const SaveFile& file : files) {
    for (const TensorView& view : file.tensors) {
      if (options.dtype && is_floating(view.dtype) && view.dtype != *options.dtype &&
          (dtype_bits(view.dtype) < 16 || dtype_bits(*options.dtype) < 16)) {
        fail(Code::kUnsupported, "'{}' is {}; types below 16 bits are not cast", view.name, dtype_name(view.dtype));
      }
    }
  }
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string facts_of(std::span<const SaveFile> files, const base::Path& path, const SaveOptions& options) {
  Sender facts;
  const auto metadata = [&](const Metadata& texts) {
    facts.number(static_cast<int64_t>(texts.size()));
    for (const auto& [key, text] : texts) {
      facts.text(key);
      facts.text(text);
    }
  };
  facts.text(path.string());
  facts.number(options.dtype ? static_cast<int64_t>(*options.dtype) : -1);
  facts.number(options.max_shard_size);
  facts.number((options.checksums ? 1 : 0) + (options.sequential ? 2 : 0));
  metadata(options.metadata);
  for (const SaveFile& file : files) {
    facts.text(file.name);
    metadata(file.metadata);
  }
  return facts.bytes();
}

}  // namespace

void check_call(std::span<const SaveFile> files, const SaveOptions& options) {
  check_options(files, options);
  check_views(files, options);
}

Call same_call(Group& group, std::span<const SaveFile> files, const base::Path& path, const SaveOptions& options, Deadline deadline) {
  const std::string facts = facts_of(files, path, options);
  std::random_device random;
  Sender mine;
  mine.text(facts);
  mine.text(fmt::format("{:08x}{:08x}", random(), random()));
  mine.text(host_name());
  const std::vector<std::string> all = group.all_gather(mine.bytes(), deadline);
  Call call;
  std::set<std::string> hosts;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Receiver in(all[rank]);
    if (in.text() != facts) {
      fail(Code::kInvalidArgument, "save(): rank {} was called with another path, dtype, max_shard_size or metadata than rank {}", rank,
           group.rank());
    }
    const std::string nonce = in.text();
    if (rank == 0) call.nonce = nonce;
    hosts.insert(in.text());
  }
  call.several_hosts = hosts.size() > 1;
  return call;
}

}  // namespace shardow::file
