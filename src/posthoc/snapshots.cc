// A directory holds snapshots of one run, and after a resume from an earlier step maybe some of a future that was given
// up. The last snapshot of a run says what its past was: records name processes, so that this is known. Those whose own
// past is part of it can be used.
#include "posthoc/snapshots.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "average/clock.h"
#include "base/errors.h"
#include "base/paths.h"
#include "ema/names.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace shardow::posthoc {
namespace {

using base::fail;

/// All averages of one step, in one directory.
struct Saved {
  base::Path path;
  int64_t step;
  std::shared_ptr<const Record> record;  ///< up to `step` its own; all of it is told by the last that shares it
  std::vector<decltype(Segment::schedules)> schedules;  ///< by segment
  std::vector<EmaFile> files;
  double roundoff, least;
  DType dtype;
};

std::optional<int64_t> number_in(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const bool whole =
      error == std::errc() && end == name.data() + name.size() && name.size() >= 9 && name.front() != '-';
  return whole ? std::optional(step) : std::nullopt;
}

/// By step; a snapshot rather than a checkpoint of the same step.
std::map<int64_t, base::Path> directories_in(const base::Path& directory) {
  std::map<int64_t, base::Path> found;
  for (const std::string& name : base::names_in(directory)) {
    if (const auto step = number_in(name, "step-")) found.emplace(*step, directory / name);
    if (const auto step = number_in(name, "snapshot-")) found.insert_or_assign(*step, directory / name);
  }
  return found;
}

/// Half a unit in the last place of its dtypes: in proportion to a number, and of the least ones.
std::pair<double, double> roundoff_of(const Checkpoint& file) {
  double most = 0, least = 0;
  const auto add = [&](int digits, int exponent) {
    most = std::max(most, std::ldexp(1, -digits));
    least = std::max(least, std::ldexp(1, exponent - digits));
  };
  for (const std::string& name : file.names()) {
    switch (file.tensor(name).dtype) {
      case DType::kF64: add(53, -1022); break;
      case DType::kF32: add(24, -126); break;
      case DType::kF16: add(11, -14); break;
      case DType::kBF16: add(8, -126); break;
      default: break;  // not averaged; the merge says so
    }
  }
  return {most, least};
}

std::optional<Saved> saved_in(const base::Path& path) {
  std::vector<EmaFile> files = ema_files_in(path);
  if (files.empty()) return std::nullopt;
  double roundoff = 0, least = 0;
  std::string state, record;
  for (const EmaFile& one : files) {
    const Checkpoint file = Checkpoint::open(path / one.name);
    const auto [relative, absolute] = roundoff_of(file);
    roundoff = std::max(roundoff, relative), least = std::max(least, absolute);
    const auto& told = file.metadata();
    const auto kept = told.find(kRecordKey);
    const std::string own = kept == told.end() ? "" : kept->second;
    if (&one != &files.front() && (own != record || told.at(kStateKey) != state))
      fail(Code::kCorrupt, "{}: {} and {} are of different saves", path.string(), files.front().name, one.name);
    state = told.at(kStateKey), record = own;
  }
  const average::Clock found = average::clock_from_json(state);
  Record past = record.empty() ? record_from_state(state) : until(record_from_json(record), found.counters.step);
  std::vector<decltype(Segment::schedules)> schedules;
  for (const Segment& segment : past) schedules.push_back(segment.schedules);
  return Saved{path,
               found.counters.step,
               std::make_shared<const Record>(std::move(past)),
               std::move(schedules),
               std::move(files),
               roundoff,
               least,
               found.options.dtype};
}

bool is_past_of(const Saved& one, const Saved& last) {
  return one.step <= last.step &&
         (one.record == last.record || same_past(until(*one.record, one.step), until(*last.record, one.step)));
}

/// From the last snapshot to the first: each takes the record of a later one, of whose past it is.
void share_record(Saved& saved, std::vector<Saved>& ends) {
  for (const Saved& end : ends) {
    if (!is_past_of(saved, end)) continue;
    saved.record = end.record;
    return;
  }
  ends.push_back(saved);
  size_t stretches = 0;
  for (const Saved& end : ends) {
    for (const Segment& segment : *end.record) stretches += segment.updates.size();
  }
  check_stretches(stretches);
}

std::vector<Saved> all_in(const base::Path& directory) {
  const std::map<int64_t, base::Path> directories = directories_in(directory);
  std::vector<Saved> found, ends;
  for (auto one = directories.rbegin(); one != directories.rend(); ++one) {
    auto saved = saved_in(one->second);
    if (!saved) continue;
    share_record(*saved, ends);
    found.push_back(std::move(*saved));
  }
  std::reverse(found.begin(), found.end());
  std::stable_sort(found.begin(), found.end(), [](const Saved& a, const Saved& b) { return a.step < b.step; });
  if (found.empty())
    fail(Code::kNotFound, "{} has no snapshots (snapshot-000001000/ema-*.safetensors); EMA.snapshot() saves them",
         directory.string());
  return found;
}

Profile profile_of(const std::string& key, const Saved& saved) {
  Profile profile;
  for (const auto& schedules : saved.schedules) {
    const auto found = schedules.find(key);
    if (found == schedules.end())
      fail(Code::kCorrupt, "{}: its record has no schedule of average {}", saved.path.string(), key);
    profile.push_back(found->second);
  }
  return profile;
}

/// Which of the profiles; one more where none is the same up to the end of this one, after which nothing is asked of
/// it.
size_t find_or_add(std::vector<Profile>& profiles, Profile own, size_t segments) {
  for (size_t p = 0; p < profiles.size(); ++p) {
    if (std::equal(own.begin(), own.end(), profiles[p].begin())) return p;
  }
  own.resize(segments, own.back());
  profiles.push_back(std::move(own));
  return profiles.size() - 1;
}

/// The last snapshot of each run.
std::vector<const Saved*> ends_of(const std::vector<Saved>& saved) {
  std::vector<const Saved*> ends;
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
    if (std::none_of(ends.begin(), ends.end(), [&](const Saved* end) { return is_past_of(*one, *end); }))
      ends.push_back(&*one);
  }
  return ends;
}

[[noreturn]] void fail_beside_each_other(const std::vector<const Saved*>& ends, const base::Path& directory) {
  std::vector<std::string> listed;
  listed.reserve(ends.size());
  for (const Saved* end : ends) listed.push_back(fmt::format("step {} ({})", end->step, end->path.filename().string()));
  fail(Code::kInvalidArgument,
       "{} has snapshots of {} runs that went on beside each other, and which one is meant is not known: give the "
       "step, of one of their last: {}; or keep each run's in a directory of its own",
       directory.string(), ends.size(), fmt::join(listed, ", "));
}

/// The last snapshot of the run that is asked for.
const Saved& run_of(const std::vector<Saved>& saved, const base::Path& directory, std::optional<int64_t> asked) {
  const std::vector<const Saved*> ends = ends_of(saved);
  std::vector<const Saved*> present, given_up;
  for (const Saved* end : ends) {
    const bool over = std::any_of(ends.begin(), ends.end(),
                                  [&](const Saved* other) { return gives_up(*other->record, *end->record); });
    (over ? given_up : present).push_back(end);
  }
  for (std::vector<const Saved*> found : {present, given_up}) {
    std::erase_if(found, [&](const Saved* end) { return asked && end->step < *asked; });
    if (found.empty()) continue;
    const auto same = [&](const Saved* end) {  // up to that step
      return asked ? same_past(until(*end->record, *asked), until(*found[0]->record, *asked)) : end == found[0];
    };
    if (std::all_of(found.begin(), found.end(), same)) return *found[0];
    const auto exact = std::find_if(found.begin(), found.end(), [&](const Saved* end) { return end->step == asked; });
    if (exact == found.end()) fail_beside_each_other(found, directory);
    return **exact;
  }
  fail(Code::kInvalidArgument,
       "step {}: the snapshots in {} are of steps {} to {}; give one of these, or one between them", asked.value_or(0),
       directory.string(), saved.front().step, saved.back().step);
}

void add(Snapshots& all, const Saved& saved) {
  for (const EmaFile& file : saved.files) {
    Profile own = profile_of(file.key, saved);
    all.points.push_back(
        {find_or_add(all.profiles, std::move(own), all.updates.record().size()), all.updates.until(saved.step)});
    all.there.push_back({saved.path / file.name, file.key, saved.step, saved.roundoff, saved.least});
  }
}

}  // namespace

Snapshots snapshots_in(const base::Path& directory, std::optional<int64_t> asked) {
  const std::vector<Saved> saved = all_in(directory);
  const Saved& last = run_of(saved, directory, asked);
  const int64_t step = asked.value_or(last.step);
  Snapshots all{step, Updates(until(*last.record, step)), {}, {}, {}, {}, last.dtype};
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) {  // from the last, whose profiles are longest
    const bool mine = is_past_of(*one, last);
    if (!mine && (one->step <= step || !asked)) {
      all.left_out.push_back(fmt::format(
          "{}: of another run, or of a future that this one gave up when it was resumed from an earlier step",
          one->path.string()));
    } else if (mine && one->step <= step && !one->schedules.empty()) {
      add(all, *one);
    }
  }
  std::reverse(all.left_out.begin(), all.left_out.end());
  std::reverse(all.there.begin(), all.there.end());
  std::reverse(all.points.begin(), all.points.end());
  if (all.there.empty()) {
    fail(Code::kInvalidArgument,
         "step {}: no snapshot up to there has averages that were updated; the snapshots in {} are of steps {} to {}",
         step, directory.string(), saved.front().step, last.step);
  }
  return all;
}

void check_output(const base::Path& directory, const base::Path& out) {
  const auto there = base::look_at(out);
  const bool named_alike = out.filename().string().starts_with("ema-");
  const auto above = named_alike ? base::look_at(base::parent_of(out)) : std::nullopt;
  for (const auto& [step, path] : directories_in(directory)) {
    const auto snapshot = base::look_at(path);
    if (!snapshot || !((there && there->same(*snapshot)) || (above && above->same(*snapshot)))) continue;
    fail(Code::kInvalidArgument,
         "{} would take the place of a snapshot's files, and {} would be no snapshot any more; write elsewhere: {}",
         out.string(), path.string(), (directory / "average.safetensors").string());
  }
}

}  // namespace shardow::posthoc
