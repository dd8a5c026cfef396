// load() of an Average, in the steps that callers with more to load need.
#pragma once

#include <chrono>
#include <filesystem>
#include <map>
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

/// Averages that go on from saved ones, in the steps of a file::LoadCall. `ema` must outlive it. What its functions
/// throw is one rank's.
class Loading {
 public:
  Loading(Average& ema, OptionsFrom from) : ema_(ema), from_(from) {}

  /// Names of the files of the EMA at `path`, in the order of the averages; none where the path is that of its file.
  std::vector<std::string> names_at(const std::filesystem::path& path) const;

  /// Takes the state in the `metadata` of a saved EMA with so many files. Throws for what is no EMA, has averages of
  /// other numbers, or would change options that can't be changed. `where`: for messages.
  void look(const std::map<std::string, std::string>& metadata, size_t files, const std::filesystem::path& where);

  /// look(), and everything of all `files`, which are in the order of the averages.
  std::vector<file::Chosen> choose(const file::Catalogs& files, const std::string& where, bool strict);

  void begin(int rank);  ///< takes the counters, and with OptionsFrom::kFile the options
  void give_up();        ///< the state is again what it was before

  /// How options change.
  const std::vector<OptionDifference>& changed() const noexcept { return changed_; }

 private:
  Average& ema_;
  const OptionsFrom from_;
  std::string state_, before_;  // in the files; of the averages, once they have begun
  std::vector<OptionDifference> changed_;
};

}  // namespace shardow::ema
