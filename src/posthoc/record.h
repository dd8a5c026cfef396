// What a snapshot's file says of the run before it: which updates made its averages, and by which schedules.
// docs/posthoc.md has the format.
//
// A run that was resumed has a segment for each process that it had. Segments name those processes, so that snapshots
// of a run that went on differently from an earlier step are told apart.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "shardow/schedule.h"

namespace shardow::posthoc {

inline constexpr int64_t kMostUpdates = 100'000'000;  // more would take minutes, and nobody has made as many
inline constexpr int64_t kMostStretches = 1'000'000;  // of all that a directory's records tell: 100 MB
inline constexpr int64_t kMostSteps = int64_t{1} << 53;

/// Updates at even distances.
struct Stretch {
  int64_t first, every, count;
  double samples = 0;        ///< training samples seen at the first
  double samples_every = 0;  ///< and between two

  int64_t last() const noexcept { return first + every * (count - 1); }
  double samples_at_last() const noexcept { return samples + samples_every * static_cast<double>(count - 1); }
  bool operator==(const Stretch&) const = default;
};

inline constexpr const char* kRecordKey = "shardow.snapshot";  // in the metadata of a snapshot's files

struct Segment {
  std::string run;  ///< of the process, drawn at random; empty where it took no snapshots
  std::vector<std::string> replaces =
      {};  ///< other runs, of which there were snapshots in the directory when this one came to it
  int64_t start_step = 0;
  std::map<std::string, Schedule, std::less<>> schedules;  ///< in force, by the key of the average
  std::vector<Stretch> updates;                            ///< never empty, ascending
};

using Record = std::vector<Segment>;

/// Throws kCorrupt: no such record, or updates that no run can have made; kUnsupported: of a later version, or longer
/// than any run's.
Record record_from_json(std::string_view json);

/// Throws kUnsupported where records tell more stretches than kMostStretches.
void check_stretches(size_t count);

/// Of an EMA that was saved without one, whose state tells enough where its updates were even: throws kUnsupported
/// where they were not.
Record record_from_state(std::string_view state);

/// Without the updates after `step`.
Record until(Record record, int64_t step);

/// That they are the same past: the same processes made the same updates.
bool same_past(const Record& a, const Record& b);

/// That `later`'s run took the place of `record`'s, and what that has beyond it is a future that was given up: it was
/// resumed from before the end of the same process, or found its snapshots when it began.
bool gives_up(const Record& later, const Record& record);

/// The updates of a record, one after another.
class Updates {
 public:
  explicit Updates(Record record);

  struct Update {
    size_t segment;
    bool copies;  ///< at or before start_step: the averages become the weights
    Progress progress;
  };

  const Record& record() const noexcept { return record_; }
  int64_t size() const noexcept { return size_; }
  int64_t until(int64_t step) const noexcept;  ///< how many are made when `step` is over
  Update at(int64_t i) const;

 private:
  /// A stretch, and what came before it.
  struct Row {
    size_t segment;
    Stretch stretch;
    int64_t begin, step_before, counted;  // updates before it; the last one's step; how many came after start_step
    double samples_before;
  };

  Record record_;
  std::vector<Row> rows_;
  int64_t size_ = 0;
};

}  // namespace shardow::posthoc
