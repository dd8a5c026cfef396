// A directory holds snapshots of one run, and after a resume from an earlier step maybe some of a future that was given up. The snapshot
// that reaches the step asked for says what that average's past was; those whose own past is part of it can be used.
#include "posthoc/snapshots.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "average/counters.h"
#include "base/errors.h"
#include "base/paths.h"
#include "shardow/checkpoint.h"
#include "shardow/ema_file.h"
#include "tensor/dtype.h"

namespace shardow::posthoc {
namespace {

using base::fail;

/// All averages of one step, in one directory.
struct Saved {
  base::Path path;
  int64_t step;
  Record record;
  std::vector<EmaFile> files;
  double roundoff;
  DType dtype;
};

std::optional<int64_t> number_in(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const bool whole = error == std::errc() && end == name.data() + name.size() && name.size() >= 9 && name.front() != '-';
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

double roundoff_of(const Checkpoint& file) {
  double most = 0;
  for (const std::string& name : file.names()) {
    switch (file.tensor(name).dtype) {
      case DType::kF64: most = std::max(most, std::ldexp(1, -53)); break;
      case DType::kF32: most = std::max(most, std::ldexp(1, -24)); break;
      case DType::kF16: most = std::max(most, std::ldexp(1, -11)); break;
      case DType::kBF16: most = std::max(most, std::ldexp(1, -8)); break;
      default: break;  // not averaged; the merge says so
    }
  }
  return most;
}

std::optional<Saved> saved_in(const base::Path& path) {
  std::vector<EmaFile> files = ema_files_in(path);
  if (files.empty()) return std::nullopt;
  double roundoff = 0;
  std::string state, record;
  for (const EmaFile& one : files) {
    const Checkpoint file = Checkpoint::open(path / one.name);
    roundoff = std::max(roundoff, roundoff_of(file));
    const auto& told = file.metadata();
    const auto kept = told.find(kRecordKey);
    const std::string own = kept == told.end() ? "" : kept->second;
    if (&one != &files.front() && (own != record || told.at(kStateKey) != state))
      fail(Code::kCorrupt, "{}: {} and {} are of different saves", path.string(), files.front().name, one.name);
    state = told.at(kStateKey), record = own;
  }
  const average::State found = average::state_from_json(state);
  Record past = record.empty() ? record_from_state(state) : until(record_from_json(record), found.counters.step);
  return Saved{path, found.counters.step, std::move(past), std::move(files), roundoff, found.options.dtype};
}

std::vector<Saved> all_in(const base::Path& directory) {
  std::vector<Saved> found;
  for (const auto& [step, path] : directories_in(directory)) {
    if (auto saved = saved_in(path)) found.push_back(std::move(*saved));
  }
  std::stable_sort(found.begin(), found.end(), [](const Saved& a, const Saved& b) { return a.step < b.step; });
  if (found.empty())
    fail(Code::kNotFound, "{} has no snapshots (snapshot-000001000/ema-*.safetensors); EMA.snapshot() saves them", directory.string());
  return found;
}

Profile profile_of(const std::string& key, const Record& record, const base::Path& path) {
  Profile profile;
  for (const Segment& segment : record) {
    const auto found = segment.schedules.find(key);
    if (found == segment.schedules.end()) fail(Code::kCorrupt, "{}: its record has no schedule of average {}", path.string(), key);
    profile.push_back(found->second);
  }
  return profile;
}

/// Which of the profiles; one more where none is the same up to the end of this one, after which nothing is asked of it.
size_t find_or_add(std::vector<Profile>& profiles, Profile own, size_t segments) {
  for (size_t p = 0; p < profiles.size(); ++p) {
    if (std::equal(own.begin(), own.end(), profiles[p].begin())) return p;
  }
  own.resize(segments, own.back());
  profiles.push_back(std::move(own));
  return profiles.size() - 1;
}

void add(Snapshots& all, const Saved& saved) {
  for (const EmaFile& file : saved.files) {
    Profile own = profile_of(file.key, saved.record, saved.path);
    all.points.push_back({find_or_add(all.profiles, std::move(own), all.updates.record().size()), all.updates.until(saved.step)});
    all.there.push_back({saved.path / file.name, file.key, saved.step, saved.roundoff});
  }
}

}  // namespace

Snapshots snapshots_in(const base::Path& directory, std::optional<int64_t> asked) {
  const std::vector<Saved> saved = all_in(directory);
  const int64_t step = asked.value_or(saved.back().step);
  const auto reaches = std::find_if(saved.begin(), saved.end(), [&](const Saved& one) { return one.step >= step; });
  if (reaches == saved.end() || saved.front().step > step) {
    fail(Code::kInvalidArgument, "step {}: the snapshots in {} are of steps {} to {}; give one of these, or one between them", step,
         directory.string(), saved.front().step, saved.back().step);
  }
  Snapshots all{step, Updates(until(reaches->record, step)), {}, {}, {}, {}, saved.front().dtype};
  for (auto one = reaches->step == step ? reaches + 1 : reaches; one-- != saved.begin();) {  // from the last, whose profiles are longest
    if (!same_past(one->record, until(all.updates.record(), one->step))) {
      all.left_out.push_back(fmt::format("{}: its run went on differently before step {}, after a resume or with other updates",
                                         one->path.string(), one->step));
    } else if (!one->record.empty()) {
      add(all, *one);
    }
  }
  std::reverse(all.left_out.begin(), all.left_out.end());
  std::reverse(all.there.begin(), all.there.end());
  std::reverse(all.points.begin(), all.points.end());
  if (all.there.empty()) fail(Code::kNotFound, "{}: no snapshot up to step {} has averages that were updated", directory.string(), step);
  return all;
}

}  // namespace shardow::posthoc
