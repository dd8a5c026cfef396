#include "file/save_request.h"

#include <set>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "file/index.h"
#include "file/names.h"
#include "tensor/dtype.h"

namespace shardow::file {
namespace {

using base::fail;

void check_options(std::span<const SaveFile> files, const SaveOptions& options) {
  if (options.dtype && !is_floating(*options.dtype))
    fail(Code::kInvalidArgument, "dtype {}: only floating tensors are cast, and to floating types",
         dtype_name(*options.dtype));
  if (options.max_shard_size < 0) fail(Code::kInvalidArgument, "max_shard_size {} is negative", options.max_shard_size);
  std::set<std::string> names;
  for (const SaveFile& file : files) {
    const bool plain = base::Path(file.name).filename() == file.name && file.name.ends_with(".safetensors");
    const bool alone = file.name.empty() && files.size() == 1;  // a checkpoint named by the path
    if (!alone && (!plain || !names.insert(file.name).second))
      fail(Code::kInvalidArgument,
           "'{}' is no name for one of several files: a plain one that ends in .safetensors, once", file.name);
  }
  for (const auto& [name, text] : options.texts) {
    if (name.empty() || name == "." || name == ".." || base::Path(name).filename() != name ||
        name.ends_with(".safetensors") || name == kIndexName || (name == kAveragesName && name != options.commit))
      fail(Code::kInvalidArgument,
           "'{}' is no name for a text beside a checkpoint: a plain one, of no file that a save writes", name);
  }
  if (const auto text = options.texts.find(options.commit); !options.commit.empty()) {
    const bool is_list = options.commit == kAveragesName || options.commit == kManifestName;
    if (!is_list || names.empty() || (text != options.texts.end() && !text->second.ends_with('}')))
      fail(Code::kInvalidArgument,
           "commit '{}': {} or {} of rank 0's texts, a JSON object, goes with files that have names", options.commit,
           kAveragesName, kManifestName);
  }
  if (options.max_shard_size > 0 && !names.empty())
    fail(Code::kInvalidArgument, "max_shard_size splits one file; {} are given", files.size());
}

void check_views(std::span<const SaveFile> files, const SaveOptions& options, bool is_produced) {
  for (const SaveFile& file : files) {
    if (!is_produced) check_memory(file.tensors);
    for (const TensorView& view : file.tensors) {
      if (file.exact && options.dtype && view.dtype != *options.dtype && is_floating(view.dtype)) {
        fail(Code::kInvalidArgument,
             "'{}'{}{} is {} and a run goes on from it: dtype {} would round it. Save it without; for inference save "
             "an Average's views() "
             "as tensors",
             view.name, file.name.empty() ? "" : " of ", file.name, dtype_name(view.dtype), dtype_name(*options.dtype));
      }
      if (options.dtype && is_floating(view.dtype) && view.dtype != *options.dtype &&
          (dtype_bits(view.dtype) < 16 || dtype_bits(*options.dtype) < 16)) {
        fail(Code::kUnsupported, "'{}' is {}; types below 16 bits are not cast", view.name, dtype_name(view.dtype));
      }
    }
  }
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

}  // namespace

void check_request(const Request& request, const Producer* producer) {
  const auto& [files, path, options, facts] = request;
  if (producer != nullptr && producer->threads < 1) fail(Code::kInvalidArgument, "{} threads", producer->threads);
  check_options(files, options);
  check_views(files, options, producer != nullptr);
  if (!makes_directory(files, path) && !options.texts.empty())
    fail(Code::kInvalidArgument, "{}: {} goes with a directory, and this is the name of one file", path.string(),
         options.texts.begin()->first);
}

group::Facts facts_of(const Request& request) {
  const auto& [files, path, options, more] = request;
  std::vector<std::string> names;
  names.reserve(files.size());
  for (const SaveFile& file : files) names.push_back(file.name);
  group::Facts facts = {{"path", path.string()},
                        {"dtype", options.dtype ? std::string(dtype_name(*options.dtype)) : "none"},
                        {"max_shard_size", size_text(options.max_shard_size)},
                        {"checksums", options.checksums ? "on" : "off"},
                        {"commit", options.commit.empty() ? "none" : options.commit},
                        {"the list of files", fmt::format("[{}]", fmt::join(names, ", "))}};
  facts.insert(facts.end(), more.begin(), more.end());
  return facts;
}

bool makes_directory(std::span<const SaveFile> files, const base::Path& path) {
  return files.size() != 1 || !files[0].name.empty() || path.extension() != ".safetensors";
}

void check_memory(std::span<const TensorView> views) {
  for (const TensorView& view : views) {
    if (view.data == nullptr && view.region.size() > 0)
      fail(Code::kInvalidArgument, "'{}' has no memory: its data is null", view.name);
  }
}

}  // namespace shardow::file
