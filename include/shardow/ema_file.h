// An EMA in files: an Average with its state, saved by all ranks, loaded by any number of them. C++ and Python write the same bytes, and
// each goes on from what the other wrote, bit for bit.
//
//   shardow::save(group, ema, "run/ema.safetensors");
//   shardow::load(group, ema, "run/ema.safetensors");  // another run, other ranks, another sharding
//
// With several schedules the path is a directory: it has a file for each average, and all appear together. docs/file_format.md shows the
// bytes. For inference save the averages as tensors: save(group, ema.views(), "run/model", {.dtype = DType::kBF16}).
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

/// All averages of `ema` with its state, as save() of tensors in checkpoint.h; several are a directory whatever `path` is called.
/// Collective. Throws kInvalidArgument, on every rank, where updates or options differ between ranks, or values of the same elements (in
/// host memory); where two schedules are equal; while swapped; and for options.dtype, which would round averages.
SaveReport save(Group& group, const Average& ema, const std::filesystem::path& path, const SaveOptions& options = {});

struct EmaLoadReport {
  std::vector<std::string> missing, unexpected;  ///< tensors; only with LoadOptions::strict = false
  std::vector<OptionDifference> changed;         ///< options that were others, and are the file's now (but the dtype)
  int64_t bytes_read = 0;                        ///< by this rank
  double seconds = 0;
};

/// The averages of `ema` and their state, so that the run goes on as if it had not stopped. `from`: whose options hold from now on. Several
/// averages come in the order of the save, whatever yours was: ask schedules()[k] what views(k) is now. With OptionsFrom::kOwn they come by
/// their schedules' keys, where these are the same. Collective.
///
/// All is compared on all ranks before anything changes. Throws as load() of tensors, and kCorrupt for a file that is no saved EMA. Where
/// reading fails halfway, or a checksum differs, the state is what it was, but averages may be the file's: load another one.
EmaLoadReport load(Group& group, Average& ema, const std::filesystem::path& path, const LoadOptions& options = {},
                   OptionsFrom from = OptionsFrom::kFile);

/// The same from a file that is open already, by Checkpoint::open(group, ...): of one schedule.
EmaLoadReport load(Group& group, Average& ema, const Checkpoint& checkpoint, const LoadOptions& options = {},
                   OptionsFrom from = OptionsFrom::kFile);

/// What save() writes, for saves with more in them (weights, an optimizer) and for those in the background:
///
///   std::vector<SaveFile> files = ema_files(group, ema);
///   if (files.size() == 1) files[0].name = "ema.safetensors";  // of one schedule it is "", for a path of its own
///   files.push_back({"training.safetensors", views});
///   save(group, files, "run");                           // or StagedSave(group, files, "run", {})
///
/// The averages must stay as they are until they are written or staged. These files are SaveFile::exact: averages are never rounded.
/// Collective; throws as save(), but values are not compared.
std::vector<SaveFile> ema_files(Group& group, const Average& ema, std::chrono::milliseconds timeout = std::chrono::milliseconds(600'000));

/// The file of one of several averages, by its Schedule::key(): "ema-0.999.safetensors", "ema-power-sigma_rel=0.1.safetensors".
std::string ema_file_name(std::string_view key);

}  // namespace shardow
#pragma GCC visibility pop
