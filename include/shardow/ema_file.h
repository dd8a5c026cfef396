// What makes safetensors files an EMA: what its averages are called, and the key under which its state stands in their metadata.
//
// An EMA with one schedule is a checkpoint whose metadata have Average::state() under kStateKey. One with several is a directory with a
// file for each schedule, which appear together and all have that state; docs/file_format.md shows how they are written and read.
//
// For any thread, without a group.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/schedule.h"

#pragma GCC visibility push(default)
namespace shardow {

inline constexpr const char* kStateKey = "shardow.state";  ///< in the metadata of a file

/// Schedule::key() of each. Throws kInvalidArgument for equal schedules, since nothing could tell their averages apart.
std::vector<std::string> decay_keys(std::span<const Schedule> schedules);

/// The same of the EMA that a file's metadata tell of, in its order; empty where the file is no saved EMA.
std::vector<std::string> decay_keys_in(const std::map<std::string, std::string>& metadata);

/// "ema-0.999.safetensors": the file of one of several averages, by its key. What a file name should not have in it becomes "-".
std::string ema_file_name(std::string_view key);

/// One of several averages in a directory.
struct EmaFile {
  std::string key, name;
};

/// The files of the EMA with several schedules that was saved in `directory` last, in its order; none where there is no such EMA, or no
/// such directory. `beside_a_model`: also where a checkpoint in the Hugging Face layout lies there, which is what the directory is by
/// itself. Throws kIo, and kCorrupt for an ema-*.safetensors that is none. Reads the headers of these files, newest first, until one tells.
std::vector<EmaFile> ema_files_in(const std::filesystem::path& directory, bool beside_a_model = true);

}  // namespace shardow
#pragma GCC visibility pop
