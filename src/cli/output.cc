#include "cli/output.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow::cli {
namespace {

const std::vector<std::pair<std::string, DType>> kDTypes = {
    {"float64", DType::kF64}, {"float32", DType::kF32}, {"bfloat16", DType::kBF16}, {"float16", DType::kF16}};

const std::vector<std::pair<std::string, double>> kUnits = {
    {"", 1},     {"B", 1},    {"K", 1e3},   {"KB", 1e3},   {"M", 1e6},       {"MB", 1e6},      {"G", 1e9},
    {"GB", 1e9}, {"T", 1e12}, {"TB", 1e12}, {"KIB", 1024}, {"MIB", 1048576}, {"GIB", 1 << 30}, {"TIB", 0x1p40},
};

/// The dtype that is also spelled "bf16", "BF16" or "Float32"; other texts stay.
std::string in_full(std::string text) {
  static const std::map<std::string, std::string, std::less<>> kShort = {{"f64", "float64"},  {"f32", "float32"},
                                                                         {"fp32", "float32"}, {"bf16", "bfloat16"},
                                                                         {"f16", "float16"},  {"fp16", "float16"}};
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto full = kShort.find(text);
  return full == kShort.end() ? text : full->second;
}

/// What elsewhere means standard output.
std::string no_stream(const std::string& path) {
  return path == "-" ? "'-': a checkpoint is no stream, and does not go to standard output; for a directory with that "
                       "name give ./-"
                     : "";
}

}  // namespace

int64_t parse_size(const std::string& text) {
  double number = 0;
  size_t used = 0;
  try {
    number = std::stod(text, &used);
  } catch (const std::exception&) {  // said below
  }
  std::string unit = CLI::detail::trim_copy(text.substr(used));
  for (char& c : unit) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  for (const auto& [name, bytes] : kUnits) {
    if (used > 0 && name == unit && number >= 1 && number * bytes < 0x1p62) return static_cast<int64_t>(number * bytes);
  }
  base::fail(Code::kInvalidArgument, "'{}' is no size; give bytes, or a size like 5GB or 500MiB", text);
}

std::optional<DType> OutputOptions::file_dtype() const {
  for (const auto& [name, value] : kDTypes) {
    if (name == dtype) return value;
  }
  return std::nullopt;
}

int64_t OutputOptions::shard_bytes() const {
  if (!max_shard_size) return 0;
  const int64_t bytes = parse_size(*max_shard_size);
  if (std::filesystem::path(path).extension() == ".safetensors") {
    base::fail(Code::kInvalidArgument,
               "--max-shard-size goes with a directory, and {} is the name of one file; leave .safetensors out", path);
  }
  return bytes;
}

MergeOptions OutputOptions::merge_options(const std::string& verb, int threads) const {
  return {.dtype = file_dtype(), .max_shard_size = shard_bytes(), .threads = threads, .progress = watched(verb)};
}

std::vector<CLI::Option*> add_output(CLI::App& verb, OutputOptions& options, bool required) {
  std::vector<std::string> names;
  names.reserve(std::size(kDTypes));
  for (const auto& [name, value] : kDTypes) names.push_back(name);
  std::vector<CLI::Option*> added;
  added.push_back(
      verb.add_option("-o,--output", options.path,
                      "what to write: a file if it ends in .safetensors, else a directory; it replaces what is there")
          ->required(required)
          ->check(no_stream, "")
          ->option_text("OUT"));
  added.push_back(verb.add_option("--dtype", options.dtype, "of floating tensors; others stay as they are")
                      ->transform(in_full)
                      ->check(CLI::IsMember(names))
                      ->option_text(CLI::detail::join(names, "|")));
  added.push_back(
      verb.add_option("--max-shard-size", options.max_shard_size,
                      "files of a directory are as large at most, like 5GB or 500MiB; a tensor is never cut")
          ->option_text("SIZE"));
  add_json(verb, options.json);
  return added;
}

ProgressFn watched(const std::string& what) {
  return [line = std::make_shared<ProgressLine>(what)](int64_t done, int64_t total) {
    check_interrupted();
    line->tell(done, total);
  };
}

std::map<std::string, std::string> metadata_of(const Checkpoint& checkpoint) {
  std::map<std::string, std::string> all;
  for (const StoredFile& file : checkpoint.files()) all.insert(file.metadata.begin(), file.metadata.end());
  all.erase("format");
  return all;
}

}  // namespace shardow::cli
