// A load in two halves: all that can be compared, then the state and the averages.
#include "ema/loading.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "average/clock.h"
#include "base/errors.h"
#include "base/paths.h"
#include "base/turns.h"
#include "ema/agreed.h"
#include "ema/names.h"
#include "file/load.h"
#include "group/facts.h"

namespace shardow {
namespace ema {
namespace {

using base::fail;
using Keys = std::vector<std::string>;

const char* name_of(OptionsFrom from) {
  return from == OptionsFrom::kFile ? "'file'" : "'own'";
}

std::string counted(const Keys& keys) {
  return keys.size() == 1 ? fmt::format("one average ({})", keys[0])
                          : fmt::format("the averages of {} decays ({})", keys.size(), fmt::join(keys, ", "));
}

/// The keys of an EMA that was saved with several decays, in its order, beside a model where several are `wanted`.
/// Where several are `wanted`, also of one that was saved with one. None where it is neither, or nothing that can be
/// read: then opening it says so.
Keys keys_at(const base::Path& path, size_t wanted) {
  try {
    Keys keys;
    for (EmaFile& one : ema_files_in(path, wanted > 1)) keys.push_back(std::move(one.key));
    if (!keys.empty() || wanted == 1) return keys;
    return decay_keys_in(Checkpoint::open(path).metadata());
  } catch (const Error&) {
    return {};
  } catch (const std::filesystem::filesystem_error&) {
    return {};
  }
}

const std::string& state_in(const std::map<std::string, std::string>& metadata, const std::string& where) {
  const auto found = metadata.find(kStateKey);
  if (found != metadata.end()) return found->second;
  fail(Code::kCorrupt,
       "{} is not a saved EMA: its metadata has no '{}'; load weights alone as such (in Python with load_state_dict())",
       where, kStateKey);
}

/// `names` that are not in `all` yet: of several files each has the same ones.
void add(const std::vector<std::string>& names, std::vector<std::string>& all) {
  const std::set<std::string> known(all.begin(), all.end());
  std::copy_if(names.begin(), names.end(), std::back_inserter(all),
               [&](const std::string& name) { return !known.contains(name); });
}

}  // namespace

Keys taken_as(const Keys& theirs, const Keys& own, OptionsFrom from, const std::string& where) {
  const bool same = theirs.size() == own.size() && std::is_permutation(theirs.begin(), theirs.end(), own.begin());
  if (theirs.empty() || (same && from == OptionsFrom::kOwn)) return own;
  if (theirs.size() == own.size()) return theirs;
  const std::string wanted = theirs.size() == 1 ? theirs[0] : fmt::format("[{}]", fmt::join(theirs, ", "));
  fail(Code::kInvalidArgument, "{} has {}, this EMA keeps {}: nothing was loaded. Make the EMA with decay={}", where,
       counted(theirs), counted(own), wanted);
}

std::vector<std::string> Loading::names_at(const base::Path& path) const {
  const Keys own = decay_keys(ema_.schedules()), keys = taken_as(keys_at(path, own.size()), own, from_, path.string());
  std::vector<std::string> names;
  for (const std::string& key : keys.size() > 1 ? keys : Keys()) names.push_back(ema_file_name(key));
  return names;
}

void Loading::look(const std::map<std::string, std::string>& metadata, size_t files, const base::Path& where) {
  if (files != ema_.size()) {
    fail(Code::kInvalidArgument,
         "{} is one file, and this EMA keeps {} averages, each in its own; load their directory", where.string(),
         ema_.size());
  }
  state_ = state_in(metadata, where.string());
  taken_as(decay_keys_in({{kStateKey, state_}}), decay_keys(ema_.schedules()), from_, where.string());
  if (from_ == OptionsFrom::kFile) changed_ = ema_.differences(state_);
}

std::vector<file::Chosen> Loading::choose(const file::Catalogs& files, const std::string& where, bool strict) {
  look(files.front()->metadata(), files.size(), where);
  std::vector<file::Chosen> chosen;
  for (size_t k = 0; k < ema_.size(); ++k) {
    const std::span<const TensorView> views = ema_.views(k);  // throws while swapped
    chosen.push_back({{views.begin(), views.end()}, strict});
  }
  return chosen;
}

void Loading::begin(int rank) {
  before_ = ema_.state();
  ema_.set_state(own_part(state_, rank), from_);
}

void Loading::give_up() {
  if (!before_.empty() && ema_.state() != before_) ema_.set_state(before_);
}

namespace {

/// `call`: by its find() or `open`. `where`: for messages.
EmaLoadReport load_by(Group& group, const Average& ema, Loading& loading, OptionsFrom from, file::LoadCall call,
                      const std::string& where, const LoadOptions& options) {
  EmaLoadReport report;
  const auto begin = base::now();
  std::optional<group::EqualFacts> facts;
  call.compared = [&] {
    const group::Facts asked = {{"the EMA", counted(decay_keys(ema.schedules()))},
                                {"options", name_of(from)},
                                {"strict", options.strict ? "true" : "false"},
                                {"verify", options.verify ? "true" : "false"}};
    return group::Comparisons{&facts.emplace("load()", asked)};
  };
  call.choose = [&](const auto&, const file::Catalogs& files) { return loading.choose(files, where, options.strict); };
  call.begin = [&](const auto&) { loading.begin(group.rank()); };
  try {
    for (const LoadReport& one : call.run(group, options)) {
      add(one.missing, report.missing);
      add(one.unexpected, report.unexpected);
      report.bytes_read += one.bytes_read;
    }
  } catch (...) {
    loading.give_up();
    throw;
  }
  report.changed = loading.changed();
  report.seconds = base::seconds_since(begin);
  return report;
}

}  // namespace
}  // namespace ema

EmaLoadReport load(Group& group, Average& ema, const std::filesystem::path& path, const LoadOptions& options,
                   OptionsFrom from) {
  group.begin("load()", options.timeout);
  ema::Loading loading(ema, from);
  const auto find = [&] { return file::Location{{path}, loading.names_at(path)}; };
  return ema::load_by(group, ema, loading, from, {{}, find, {}, {}}, path.string(), options);
}

EmaLoadReport load(Group& group, Average& ema, const Checkpoint& checkpoint, const LoadOptions& options,
                   OptionsFrom from) {
  group.begin("load()", options.timeout);
  ema::Loading loading(ema, from);
  const std::string where = checkpoint.files().at(0).path.string();
  return ema::load_by(group, ema, loading, from, {{}, {}, {file::Inside::shared(checkpoint)}, {}}, where, options);
}

}  // namespace shardow
