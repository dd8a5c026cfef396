// An EMA in files: an Average with its state, saved by all ranks, loaded by any number of them. C++ and Python write the same bytes, and
// each goes on from what the other wrote, bit for bit.
//
//   shardow::save(group, ema, "run/ema.safetensors");
//   shardow::load(group, ema, "run/ema.safetensors");  // another run, other ranks, another sharding
//
// One average is a checkpoint whose metadata have the state under kStateKey. Several are a directory with a file for each, which appear
// together and all have that state; docs/file_format.md shows the bytes. For inference save the averages as tensors:
// save(group, ema.views(), "run/model", {.dtype = DType::kBF16}).
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/average.h"
#include "shardow/checkpoint.h"
#include "shardow/group.h"
#include "shardow/schedule.h"

#pragma GCC visibility push(default)
namespace shardow {

/// All averages of `ema` with its state. `path` ends in .safetensors; with several schedules it is a directory. Every rank writes what it
/// holds, as save() of tensors does, which says more. Collective. Throws kInvalidArgument on every rank where ranks have made other
/// updates, have other options, or hold other values of the same elements (in host memory); while swapped; for options.dtype, since the way
/// back would lose bits.
SaveReport save(Group& group, const Average& ema, const std::filesystem::path& path, const SaveOptions& options = {});

/// What that save writes, to be written while training goes on:
///
///   StagedSave save(group, ema_files(ema, agreed_state(group, ema)), path, options);
///
/// `ema` must not be updated before stage(), nor change its memory. A tensor of which each rank has its own (batch statistics) is one
/// rank's to save: the others erase it from their files' tensors. Values are not compared here. Local.
std::vector<SaveFile> ema_files(const Average& ema, const std::string& state);

/// Average::state() of all ranks together, which is what a file has. `call` is for messages. Collective. Throws as save(),
/// but for values.
std::string agreed_state(Group& group, const Average& ema, std::string_view call = "save()",
                         std::chrono::milliseconds timeout = std::chrono::milliseconds(600'000));

struct EmaLoadReport {
  std::vector<std::string> missing, unexpected;  ///< of LoadOptions::strict = false: the rest
  std::vector<OptionDifference> changed;  ///< what differed from the Average's own options, and is as in the file now (but the dtype)
  int64_t bytes_read = 0;                 ///< by this rank
  double seconds = 0;
};

/// Fills the averages of `ema` and takes their state: the run goes on as if it had not stopped. `from`: whose schedules, rule, rounding,
/// update_every, start_step and seed hold from now on. Several averages are taken in the order of their schedules in the file, with
/// OptionsFrom::kOwn by their keys where these are the same. Collective. Everything is compared on all ranks first; throws kInvalidArgument
/// for what does not fit, kCorrupt for a file that is no saved EMA, and as load() of tensors does. Where it throws the state is what it
/// was; averages, only where reading failed halfway or checksums differ, may be the file's: load another one.
EmaLoadReport load(Group& group, Average& ema, const std::filesystem::path& path, const LoadOptions& options = {},
                   OptionsFrom from = OptionsFrom::kFile);

// What files are called, for readers of their own.

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
