// A load in two halves: all that can be compared, then the state and the averages.
#include "ema/loading.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "average/counters.h"
#include "base/errors.h"
#include "base/paths.h"
#include "base/turns.h"
#include "comm/agree.h"
#include "comm/wire.h"
#include "ema/agreed.h"
#include "ema/names.h"
#include "file/environment.h"
#include "file/load.h"

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

/// Rank 0's keys_at(), for all, who must have the same averages and want the same: one small message.
Keys shared_keys(Group& group, const base::Path& path, const Keys& own, OptionsFrom from, Deadline deadline) {
  const auto mine = [&] {
    comm::Sender out;
    out.text(said({{"the EMA", counted(own)}, {"options", name_of(from)}}));
    if (group.rank() == 0) {
      for (const std::string& key : keys_at(path, own.size())) out.text(key);
    }
    return out.bytes();
  };
  const std::string all = comm::agree_on(group, deadline, mine, [](const std::vector<std::string>& words) {
    std::vector<std::string> everybody;
    everybody.reserve(words.size());
    for (const std::string& one : words) everybody.push_back(comm::Receiver(one).text());
    check_same("load()", everybody);
    return words[0];
  });
  comm::Receiver in(all);
  in.text();
  Keys keys;
  while (!in.done()) keys.push_back(in.text());
  return keys;
}

const std::string& state_in(const Checkpoint& file, const std::string& where) {
  const auto found = file.metadata().find(kStateKey);
  if (found != file.metadata().end()) return found->second;
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

std::vector<Checkpoint> open(Group& group, const Average& ema, const base::Path& path, OptionsFrom from,
                             std::chrono::milliseconds timeout) {
  const Keys own = decay_keys(ema.schedules());
  const Keys keys = taken_as(shared_keys(group, path, own, from, base::after(timeout)), own, from, path.string());
  if (keys.size() == 1) return {Checkpoint::open(group, path, timeout)};
  std::vector<std::string> names;
  for (const std::string& key : keys) names.push_back(ema_file_name(key));
  return Checkpoint::open_files(group, path, names, timeout);
}

Loading::Loading(Group& group, Average& ema, std::vector<Checkpoint> files, std::string where, LoadOptions options,
                 OptionsFrom from)
    : group_(group),
      ema_(ema),
      files_(std::move(files)),
      where_(std::move(where)),
      options_(std::move(options)),
      from_(from) {
  const Facts facts = {{"strict", options_.strict ? "true" : "false"},
                       {"verify", options_.verify ? "true" : "false"},
                       {"options", name_of(from)}};
  const auto mine = [&] {
    static_cast<void>(ema_.views());  // throws while swapped
    state_ = state_in(files_.at(0), where_);
    taken_as(decay_keys_in({{kStateKey, state_}}), decay_keys(ema_.schedules()), from_, where_);
    if (from_ == OptionsFrom::kFile) report_.changed = ema_.differences(state_);
    return said(facts);
  };
  comm::agree_on(group, base::after(options_.timeout), mine, [](const std::vector<std::string>& everybody) {
    check_same("load()", everybody);
    return std::string();
  });
  wanted_.resize(files_.size());
  for (size_t k = 0; k < files_.size(); ++k) {
    const LoadReport one = read(k, true);
    add(one.missing, report_.missing);
    add(one.unexpected, report_.unexpected);
  }
}

LoadReport Loading::read(size_t k, bool check_only) {
  LoadOptions options = options_;
  options.check_only = check_only;
  if (check_only) options.progress = {};
  return file::load_from(group_, ema_.views(k), file::Inside::of(files_[k]), options, &wanted_[k]);
}

EmaLoadReport Loading::take() {
  const auto begin = base::now();
  const std::string before = ema_.state();
  try {
    agree(group_, base::after(options_.timeout), [&] { ema_.set_state(own_part(state_, group_.rank()), from_); });
    for (size_t k = 0; k < files_.size(); ++k) report_.bytes_read += read(k, false).bytes_read;
  } catch (...) {
    if (ema_.state() != before) ema_.set_state(before);
    throw;
  }
  report_.seconds = base::seconds_since(begin);
  return std::move(report_);
}

}  // namespace ema

EmaLoadReport load(Group& group, Average& ema, const std::filesystem::path& path, const LoadOptions& options,
                   OptionsFrom from) {
  group.begin("load()", options.timeout);
  const auto timed = file::timed_calls(group, options.timeout);  // files are opened through it, and gone before it
  const Environment machine{timed.get()};
  const file::InEnvironment here(&machine);
  std::vector<Checkpoint> files = ema::open(group, ema, path, from, options.timeout);
  ema::Loading loading(group, ema, std::move(files), path.string(), options, from);
  return options.check_only ? loading.report() : loading.take();
}

EmaLoadReport load(Group& group, Average& ema, const Checkpoint& checkpoint, const LoadOptions& options,
                   OptionsFrom from) {
  group.begin("load()", options.timeout);
  const std::string where = checkpoint.files().at(0).path.string();
  agree(group, base::after(options.timeout), [&] {
    if (ema.size() == 1) return;
    base::fail(Code::kInvalidArgument,
               "{} is one file, and this EMA keeps {} averages, each in its own; load their directory", where,
               ema.size());
  });
  ema::Loading loading(group, ema, {checkpoint}, where, options, from);
  return options.check_only ? loading.report() : loading.take();
}

}  // namespace shardow
