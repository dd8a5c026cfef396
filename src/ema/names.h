// What the files of a saved EMA are called, what is in them, and which of them lie in a directory.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "shardow/ema_file.h"
#include "shardow/schedule.h"

namespace shardow {

inline constexpr const char* kStateKey = "shardow.state";  ///< in the metadata of a file: Average::state()

/// Schedule::key() of each. Throws kInvalidArgument for equal schedules, since nothing could tell their averages apart.
std::vector<std::string> decay_keys(std::span<const Schedule> schedules);

/// The same of the EMA that a file's metadata tell of, in its order; empty where the file is no saved EMA.
std::vector<std::string> decay_keys_in(const std::map<std::string, std::string>& metadata);

/// One of several averages in a directory.
struct EmaFile {
  std::string key, name;
};

/// The files of the EMA with several schedules that was saved in `directory` last, in its order; none where there is no
/// such EMA, or no such directory. `beside_a_model`: also where a checkpoint in the Hugging Face layout lies there,
/// which is what the directory is by itself. Throws kIo, and kCorrupt for an ema-*.safetensors that is none. Reads the
/// headers of these files, newest first, until one tells.
std::vector<EmaFile> ema_files_in(const std::filesystem::path& directory, bool beside_a_model = true);

/// The files of `ema` with the state of all ranks, to be saved. A tensor of which each rank has its own (batch
/// statistics) is one rank's to save: the others erase it from their files' tensors. Local.
std::vector<SaveFile> ema_files_with(const Average& ema, const std::string& state);

}  // namespace shardow
