// An Average in files, saved by all ranks and loaded by any number of them, bit for bit; Python has the same files.
//
// Of several schedules the path is a directory. The averages alone: save() of views() (checkpoint.h).
#pragma once

#include "shardow/average.h"
#include "shardow/checkpoint.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Collective. Throws where ranks' steps, options or copies of an element differ, and for options.dtype.
SaveReport save(Group& group, const Average& ema, const std::filesystem::path& path, const SaveOptions& options = {});

struct EmaLoadReport {
  std::vector<std::string> missing, unexpected;
  std::vector<OptionDifference> changed;  ///< options, now the file's
  int64_t bytes_read = 0;
  double seconds = 0;
};

/// Collective. The run goes on as if it had not stopped, its schedules() as saved. Where reading fails halfway averages
/// may be the file's.
EmaLoadReport load(Group& group, Average& ema, const std::filesystem::path& path, const LoadOptions& options = {},
                   OptionsFrom from = OptionsFrom::kFile);

/// Of Checkpoint::open(group, ...) and one schedule.
EmaLoadReport load(Group& group, Average& ema, const Checkpoint& checkpoint, const LoadOptions& options = {},
                   OptionsFrom from = OptionsFrom::kFile);

/// Collective: what save() writes, to be saved with more or by StagedSave. No update until it is written or staged.
std::vector<SaveFile> ema_files(Group& group, const Average& ema,
                                std::chrono::milliseconds timeout = std::chrono::milliseconds(600'000));

/// Of several: "ema-0.999.safetensors".
std::string ema_file_name(std::string_view key);

}  // namespace shardow
#pragma GCC visibility pop
