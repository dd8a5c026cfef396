// load() of an Average, in the steps that callers with more to load need.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "file/load.h"
#include "shardow/average.h"
#include "shardow/checkpoint.h"
#include "shardow/ema_file.h"
#include "shardow/group.h"

namespace shardow::ema {

/// Which of `theirs`, the keys of a saved EMA, each average that has one of the keys `own` goes on from: in their order
/// there, or with OptionsFrom::kOwn the same keys. `theirs` empty, of what is no EMA: `own`. `where` is for messages.
/// Throws kInvalidArgument where their numbers differ.
std::vector<std::string> taken_as(const std::vector<std::string>& theirs, const std::vector<std::string>& own,
                                  OptionsFrom from, const std::string& where);

/// The files of the EMA that was saved to `path`, open, in the order of the averages of `ema`. Collective. Throws as
/// load().
std::vector<Checkpoint> open(Group& group, const Average& ema, const std::filesystem::path& path, OptionsFrom from,
                             std::chrono::milliseconds timeout);

/// Averages that are about to be loaded: whatever does not fit is an error when this is made, before anything has
/// changed.
class Loading {
 public:
  /// `files`: one for each average, in their order; `where` is for messages. `group` and `ema` must outlive this.
  /// Collective.
  Loading(Group& group, Average& ema, std::vector<Checkpoint> files, std::string where, LoadOptions options,
          OptionsFrom from);

  /// What does not match, and how options will change; nothing is read yet.
  const EmaLoadReport& report() const noexcept { return report_; }

  /// Collective. Once.
  EmaLoadReport take();

 private:
  LoadReport read(size_t k, bool check_only);

  Group& group_;
  Average& ema_;
  std::vector<Checkpoint> files_;
  std::string where_;
  LoadOptions options_;
  OptionsFrom from_;
  std::string state_;                                ///< in the files
  std::vector<std::optional<file::Wanted>> wanted_;  ///< of each file, when it has been compared
  EmaLoadReport report_;
};

}  // namespace shardow::ema
