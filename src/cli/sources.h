// What a path on the command line names.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "shardow/checkpoint.h"

namespace shardow::cli {

/// Files that belong together. Of a directory several may lie side by side: a model in the Hugging Face layout, an
/// EMA's files, one for each decay, an optimizer's states.
struct Source {
  std::string label;  ///< "" for the file or the model itself, else the name of the file
  Checkpoint checkpoint;
};

/// Checkpoint::open(), which says of files of other tools what they are: throws kUnsupported then.
Checkpoint open_checkpoint(const std::filesystem::path& path);

/// A file; or a directory: its model, where it has one, then its other .safetensors files by name. Never none: throws
/// kNotFound.
std::vector<Source> open_sources(const std::filesystem::path& path);

/// The one that a verb works on: throws kInvalidArgument where a directory has several and no model, naming them.
Checkpoint open_one(const std::filesystem::path& path);

/// The .safetensors files of a directory, ascending; not the drafts of saves.
std::vector<std::string> safetensors_in(const std::filesystem::path& directory);

bool has_model(const std::filesystem::path& directory);  ///< in the Hugging Face layout

/// What a tensor is called where several sources are looked at at once: "ema-0.999.safetensors/norm.weight".
std::string full_name(const Source& source, const std::string& name);

}  // namespace shardow::cli
