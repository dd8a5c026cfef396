// An Average in files, saved by all ranks and loaded by any number of them, bit for bit. Python has the same files.
//
//   save(group, ema, "run/ema.safetensors");  // group.h; of one rank: *solo()
//   load(group, ema, "run/ema.safetensors");  // another run, other ranks, another sharding
//   save(group, ema.views(), "run/model", {.dtype = DType::kBF16});  // checkpoint.h: the averages alone, for inference
//
// Of several schedules the path is a directory, with a file for each.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/average.h"
#include "shardow/checkpoint.h"
#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Collective. Throws kInvalidArgument where steps, options or copies of an element differ between ranks, a swap is open, or options.dtype
/// is given.
SaveReport save(Group& group, const Average& ema, const std::filesystem::path& path, const SaveOptions& options = {});

struct EmaLoadReport {
  std::vector<std::string> missing, unexpected;  ///< as LoadReport's
  std::vector<OptionDifference> changed;         ///< options, now the file's
  int64_t bytes_read = 0;                        ///< by this rank
  double seconds = 0;
};

/// Collective. The run goes on as if it had not stopped, with averages in the order of the save: see schedules(). Throws as load() of
/// tensors; where reading fails halfway, averages may be the file's.
EmaLoadReport load(Group& group, Average& ema, const std::filesystem::path& path, const LoadOptions& options = {},
                   OptionsFrom from = OptionsFrom::kFile);

/// From Checkpoint::open(group, ...), of one schedule.
EmaLoadReport load(Group& group, Average& ema, const Checkpoint& checkpoint, const LoadOptions& options = {},
                   OptionsFrom from = OptionsFrom::kFile);

/// Collective: what save() writes, for saves of more and in the background. Averages must not change until written or staged.
///
///   std::vector<SaveFile> files = ema_files(group, ema);
///   if (files.size() == 1) files[0].name = "ema.safetensors";  // of one schedule it has none
///   files.push_back({"training.safetensors", views});
///   save(group, files, "run");  // or StagedSave
std::vector<SaveFile> ema_files(Group& group, const Average& ema, std::chrono::milliseconds timeout = std::chrono::milliseconds(600'000));

/// Of one of several: "ema-0.999.safetensors".
std::string ema_file_name(std::string_view key);

}  // namespace shardow
#pragma GCC visibility pop
