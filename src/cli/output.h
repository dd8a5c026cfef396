// The output of verbs: the options of a checkpoint, what they say when it is written, and small files that are there
// whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/app.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "shardow/checkpoint.h"
#include "shardow/merge.h"

namespace shardow::cli {

struct OutputOptions {
  std::string path, dtype;
  std::optional<std::string> max_shard_size;
  bool json = false;

  std::optional<DType> file_dtype() const;  ///< nothing: as they are
  int64_t shard_bytes() const;              ///< 0: one file; throws kInvalidArgument where that is what `path` names
  MergeOptions merge_options(const std::string& verb, int threads) const;
};

/// -o, --dtype, --max-shard-size, --json. Returns the first three.
std::vector<CLI::Option*> add_output(CLI::App& verb, OutputOptions& options, bool required = true);

/// "5GB", "500 MiB", "12345": bytes. Throws kInvalidArgument.
int64_t parse_size(const std::string& text);

/// For SaveOptions and MergeOptions: shows how far it is, and lets Ctrl-C end the save, which then leaves nothing
/// behind.
ProgressFn watched(const std::string& what);

/// Prints what was written, in a line.
template <class Report>
void print_written(const OutputOptions& options, size_t tensors, const Report& report) {
  print("{}: {}, {}, {}\n", shown(options.path), counted(tensors, "tensor"), shown_bytes(report.bytes_written),
        counted(report.files.size(), "file"));
}

/// Metadata of all files of a checkpoint, those of the first first, without what a save writes itself.
std::map<std::string, std::string> metadata_of(const Checkpoint& checkpoint);

}  // namespace shardow::cli
