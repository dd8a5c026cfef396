#include "file/call.h"

#include <unistd.h>

#include <set>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "base/nonce.h"
#include "comm/wire.h"
#include "file/index.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using base::fail;
using comm::Receiver;
using comm::Sender;

void check_options(std::span<const SaveFile> files, const SaveOptions& options) {
  if (options.dtype && !is_floating(*options.dtype))
    fail(Code::kInvalidArgument, "dtype {}: only floating tensors are cast, and to floating types", dtype_name(*options.dtype));
  if (options.producer.threads < 1) fail(Code::kInvalidArgument, "{} threads", options.producer.threads);
  if (options.max_shard_size < 0) fail(Code::kInvalidArgument, "max_shard_size {} is negative", options.max_shard_size);
  std::set<std::string> names;
  for (const SaveFile& file : files) {
    const bool plain = base::Path(file.name).filename() == file.name && file.name.ends_with(".safetensors");
    const bool alone = file.name.empty() && files.size() == 1;  // a checkpoint named by the path
    if (!alone && (!plain || !names.insert(file.name).second))
      fail(Code::kInvalidArgument, "'{}' is no name for one of several files: a plain one that ends in .safetensors, once", file.name);
  }
  for (const auto& [name, text] : options.texts) {
    if (name.empty() || name == "." || name == ".." || base::Path(name).filename() != name || name.ends_with(".safetensors") ||
        name == kIndexName)
      fail(Code::kInvalidArgument, "'{}' is no name for a text beside a checkpoint: a plain one, of no file that a save writes", name);
  }
  if (options.max_shard_size > 0 && !names.empty())
    fail(Code::kInvalidArgument, "max_shard_size splits one file; {} are given", files.size());
}

void check_views(std::span<const SaveFile> files, const SaveOptions& options) {
  for (const SaveFile& file : files) {
    for (const TensorView& view : file.tensors) {
      if (view.data == nullptr && view.region.size() > 0 && !options.producer.read)
        fail(Code::kInvalidArgument, "'{}' has no memory, and nothing produces it", view.name);
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

/// "5 GB", "4 KiB", "1234567 bytes", "none".
std::string size_text(int64_t bytes) {
  struct Unit {
    int64_t bytes;
    const char* name;
  };
  constexpr Unit kUnits[] = {{1'000'000'000'000, "TB"}, {1LL << 40, "TiB"}, {1'000'000'000, "GB"}, {1LL << 30, "GiB"},
                             {1'000'000, "MB"},         {1LL << 20, "MiB"}, {1'000, "KB"},         {1LL << 10, "KiB"}};
  if (bytes == 0) return "none";
  for (const Unit& unit : kUnits) {
    if (bytes % unit.bytes == 0) return fmt::format("{} {}", bytes / unit.bytes, unit.name);
  }
  return fmt::format("{} bytes", bytes);
}

/// What must be equal on all ranks, by name, as it stands in messages.
std::vector<std::pair<std::string, std::string>> facts_of(std::span<const SaveFile> files, const base::Path& path,
                                                          const SaveOptions& options) {
  const auto yes = [](bool on) { return on ? "on" : "off"; };
  std::vector<std::string> names;
  for (const SaveFile& file : files) names.push_back(file.name);
  return {{"path", path.string()},
          {"dtype", options.dtype ? std::string(dtype_name(*options.dtype)) : "none"},
          {"max_shard_size", size_text(options.max_shard_size)},
          {"checksums", yes(options.checksums)},
          {"sequential", yes(options.sequential)},
          {"the list of files", fmt::format("[{}]", fmt::join(names, ", "))}};
}

void send_metadata(Sender& out, std::span<const SaveFile> files, const SaveOptions& options) {
  for (const SaveFile& file : files) {
    Metadata all = file.metadata;
    all.insert(options.metadata.begin(), options.metadata.end());
    out.number(static_cast<int64_t>(all.size()));
    for (const auto& [key, text] : all) {
      out.text(key);
      out.text(text);
    }
  }
}

Metadata received_metadata(Receiver& in) {
  Metadata all;
  for (int64_t left = in.number(); left > 0; --left) {
    std::string key = in.text();
    all[std::move(key)] = in.text();
  }
  return all;
}

}  // namespace

void check_call(std::span<const SaveFile> files, const SaveOptions& options) {
  check_options(files, options);
  check_views(files, options);
}

Call same_call(Group& group, std::span<const SaveFile> files, const base::Path& path, const SaveOptions& options, Deadline deadline) {
  const auto facts = facts_of(files, path, options);
  Sender mine;
  for (const auto& [name, value] : facts) {
    mine.text(name);
    mine.text(value);
  }
  mine.text(base::make_nonce());
  mine.text(host_name());
  if (group.rank() == 0) send_metadata(mine, files, options);
  const std::vector<std::string> all = group.all_gather(mine.bytes(), deadline);
  Call call;
  std::set<std::string> hosts;
  std::vector<std::string> first;  // rank 0's facts
  Receiver metadata({});
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Receiver in(all[rank]);
    for (size_t fact = 0; fact < facts.size(); ++fact) {
      const std::string name = in.text(), value = in.text();
      if (rank == 0) first.push_back(value);
      if (value != first[fact])
        fail(Code::kInvalidArgument, "save(): {} is {} on rank 0, {} on rank {}; give all ranks the same", name, first[fact], value, rank);
    }
    const std::string nonce = in.text();
    if (rank == 0) call.nonce = nonce;
    hosts.insert(in.text());
    if (rank == 0) metadata = in;
  }
  for (size_t file = 0; file < files.size(); ++file) call.metadata.push_back(received_metadata(metadata));
  call.several_hosts = hosts.size() > 1;
  return call;
}

}  // namespace shardow::file
