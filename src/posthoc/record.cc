// {"format":1,"segments":[{"run":"9f3c","start_step":0,"schedules":{"0.999":{..}},"updates":[[first, every, count,
// samples, samples_every],
// ..]}, ..]}; the last two numbers are left out where no schedule asks for samples. In format 2 segments of many
// stretches have "packed":{"crc32":"0123abcd","text":".."} in place of "updates": updates.h.
#include "posthoc/record.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "average/counters.h"
#include "average/json.h"
#include "base/errors.h"
#include "file/crc.h"

namespace shardow::posthoc {
namespace {

using base::fail;
namespace dom = simdjson::dom;

constexpr int64_t kFormat = 2;
constexpr size_t kMostText =
    size_t{8} << 20;  // bytes: what kMostStretches take; to parse them takes a dozen times as many
constexpr size_t kMarked = 64;

[[noreturn]] void corrupt(std::string_view why) {
  fail(Code::kCorrupt, "{} in a snapshot's metadata: {}", kRecordKey, why);
}

template <typename Value>
Value field(const dom::object& object, std::string_view key) {
  Value value;
  if (object[key].get(value) != simdjson::SUCCESS)
    corrupt(fmt::format("no \"{}\", or something else than it has", key));
  return value;
}

Stretch stretch_of(const dom::array& numbers) {
  std::vector<int64_t> whole;
  std::vector<double> samples;
  for (const dom::element one : numbers) {
    int64_t count = 0;
    double real = 0;
    if (whole.size() < 3 && one.get(count) == simdjson::SUCCESS) {
      whole.push_back(count);
    } else if (whole.size() == 3 && samples.size() < 2 && one.get(real) == simdjson::SUCCESS && real >= 0 &&
               std::isfinite(real)) {
      samples.push_back(real);
    } else {
      corrupt("updates are [first, every, count], or these and [samples, samples between]");
    }
  }
  if (whole.size() != 3 || samples.size() == 1) corrupt("updates are [first, every, count]");
  if (samples.empty()) samples = {0, 0};
  return {whole[0], whole[1], whole[2], samples[0], samples[1]};
}

std::vector<Stretch> unpacked_from(const dom::object& packed) {
  const auto text = field<std::string_view>(packed, "text"), crc = field<std::string_view>(packed, "crc32");
  if (fmt::format("{:08x}", file::crc32(0, std::as_bytes(std::span(text)))) != crc)
    corrupt("the checksum of its updates differs");
  return unpacked(text);
}

Segment segment_of(const dom::object& object) {
  Segment segment;
  segment.run = field<std::string_view>(object, "run");
  segment.start_step = field<int64_t>(object, "start_step");
  dom::array replaced;
  if (object["replaces"].get(replaced) == simdjson::SUCCESS) {
    for (const dom::element one : replaced) {
      std::string_view run;
      if (one.get(run) != simdjson::SUCCESS) corrupt("\"replaces\" is a list of runs");
      segment.replaces.emplace_back(run);
    }
  }
  for (const auto [key, value] : field<dom::object>(object, "schedules")) {
    segment.schedules.emplace(key, Schedule::from_json(simdjson::minify(value)));
  }
  dom::object packed;
  if (object["packed"].get(packed) == simdjson::SUCCESS) {
    segment.updates = unpacked_from(packed);
  } else {
    std::vector<Stretch> listed;
    for (const dom::element one : field<dom::array>(object, "updates")) {
      dom::array numbers;
      if (one.get(numbers) != simdjson::SUCCESS) corrupt("updates are lists of numbers");
      listed.push_back(stretch_of(numbers));
    }
    segment.updates = std::move(listed);
  }
  if (segment.start_step < 0 || segment.start_step > kMostSteps) corrupt("start_step is out of range");
  return segment;
}

/// Steps go up, and there are not too many of them.
void check(const Record& record) {
  int64_t last = 0, count = 0;
  size_t stretches = 0;
  for (const Segment& segment : record) {
    stretches += segment.updates.size();
    for (size_t k = 0; k < segment.updates.size(); ++k) {
      const Stretch one = segment.updates[k];
      const bool fits = one.first > last && one.first < kMostSteps && one.every >= 1 && one.every < kMostSteps &&
                        one.count >= 1 && one.count <= kMostSteps && one.every <= (kMostSteps - one.first) / one.count;
      if (!fits) corrupt(fmt::format("updates [{}, {}, {}] after step {}", one.first, one.every, one.count, last));
      last = one.last();
      count += one.count;
      if (count > kMostUpdates) fail(Code::kUnsupported, "{}: more than {} updates", kRecordKey, kMostUpdates);
    }
  }
  check_stretches(stretches);
}

void drop_empty(Record& record) {
  std::erase_if(record, [](const Segment& segment) { return segment.updates.empty(); });
}

}  // namespace

void check_stretches(size_t count) {
  if (count <= static_cast<size_t>(kMostStretches)) return;
  fail(Code::kUnsupported,
       "{}: {} stretches of updates at even distances, in steps and in samples; {} are gone through: update less often "
       "(update_every), or "
       "by steps alone",
       kRecordKey, count, kMostStretches);
}

Record record_from_json(std::string_view json) {
  if (json.size() > kMostText) {
    fail(Code::kUnsupported,
         "{} in a snapshot's metadata has {} bytes; {} are read, which tell some millions of updates", kRecordKey,
         json.size(), kMostText);
  }
  dom::parser parser;
  const auto object = average::object_in(parser, json);
  if (!object) corrupt("no JSON object");
  if (const auto format = field<int64_t>(*object, "format"); format < 1 || format > kFormat) {
    fail(Code::kUnsupported, "{}: format {}; this version reads formats 1 to {}", kRecordKey, format, kFormat);
  }
  Record record;
  for (const dom::element one : field<dom::array>(*object, "segments")) {
    dom::object segment;
    if (one.get(segment) != simdjson::SUCCESS) corrupt("a segment is no object");
    record.push_back(segment_of(segment));
  }
  drop_empty(record);
  check(record);
  return record;
}

Record record_from_state(std::string_view state) {
  const average::State found = average::state_from_json(state);
  const auto& [options, counters] = std::pair(found.options, found.counters);
  Segment segment{.run = {}, .replaces = {}, .start_step = options.start_step, .schedules = {}, .updates = {}};
  bool samples = false;
  for (const Schedule& schedule : options.schedules) {
    segment.schedules.emplace(schedule.key(), schedule);
    samples = samples || schedule.key().starts_with("half_life_in_samples");
  }
  const int64_t made = counters.updates, every = options.update_every;
  const bool even = options.start_step == 0 && !samples && made * every == counters.applied_step;
  if (!even) {
    fail(Code::kUnsupported,
         "{} updates by step {} with update_every {}, start_step {}{}: when they were made is not recorded; "
         "EMA.snapshot() records it",
         made, counters.applied_step, every, options.start_step, samples ? " and a schedule in samples" : "");
  }
  if (made == 0) return {};
  segment.updates = {{every, every, made}};
  Record record{std::move(segment)};
  check(record);
  return record;
}

Record until(Record record, int64_t step) {
  for (Segment& segment : record) segment.updates = segment.updates.until(step);
  drop_empty(record);
  return record;
}

bool same_past(const Record& a, const Record& b) {
  const auto same_stretch = [](const Stretch& x, const Stretch& y) {
    return x.first == y.first && x.count == y.count && (x.count == 1 || x.every == y.every);
  };
  const auto same_updates = [&](const Stretches& x, const Stretches& y) {
    if (x == y) return true;
    bool same = x.size() == y.size();
    for (size_t k = 0; same && k < x.size(); ++k) same = same_stretch(x[k], y[k]);
    return same;
  };
  return std::ranges::equal(a, b, [&](const Segment& x, const Segment& y) {
    return x.run == y.run && x.start_step == y.start_step && same_updates(x.updates, y.updates);
  });
}

bool gives_up(const Record& later, const Record& record) {
  if (record.empty() || record.back().run.empty()) return false;
  const std::string& run = record.back().run;
  for (size_t s = 0; s < later.size(); ++s) {
    if (later[s].run == run && s + 1 < later.size()) return true;
    if (std::ranges::find(later[s].replaces, run) != later[s].replaces.end()) return true;
  }
  return false;
}

Updates::Updates(Record record) : record_(std::move(record)) {
  if (record_.empty()) return;
  Row row{0, 0};
  size_t passed = 0;
  do {
    if (passed++ % kMarked == 0) marks_.push_back(row);
    size_ = row.begin + record_[row.segment].updates[row.stretch].count;
  } while (go_on(row));
}

/// To the next stretch; false where it is the last.
bool Updates::go_on(Row& row) const noexcept {
  const Segment& segment = record_[row.segment];
  const bool within = row.stretch + 1 < segment.updates.size();
  if (!within && row.segment + 1 == record_.size()) return false;
  const Stretch one = segment.updates[row.stretch];
  const int64_t start = segment.start_step;
  row.begin += one.count;
  row.step_before = one.last();
  row.counted += one.first > start ? one.count : one.count - std::min(one.count, (start - one.first) / one.every + 1);
  row.samples_before = one.samples_at_last();
  row.segment += within ? 0 : 1;
  row.stretch = within ? row.stretch + 1 : 0;
  return true;
}

/// The last mark that is not behind update `i`.
const Updates::Row& Updates::mark_before(int64_t i) const {
  return *(std::upper_bound(marks_.begin(), marks_.end(), i,
                            [](int64_t index, const Row& row) { return index < row.begin; }) -
           1);
}

int64_t Updates::until(int64_t step) const noexcept {
  int64_t made = 0;
  for (const Segment& segment : record_) {
    const Stretches cut = segment.updates.until(step);
    for (size_t k = 0; k < cut.size(); ++k) made += cut[k].count;
  }
  return made;
}

Updates::Update Updates::at(int64_t i) const {
  Row row = mark_before(i);
  while (i - row.begin >= record_[row.segment].updates[row.stretch].count) go_on(row);
  const Segment& segment = record_[row.segment];
  const Stretch one = segment.updates[row.stretch];
  const int64_t start = segment.start_step, k = i - row.begin, step = one.first + k * one.every;
  const int64_t before = k > 0 ? step - one.every : row.step_before;
  const int64_t copied = one.first > start ? 0 : std::min(k, (start - one.first) / one.every + 1);
  const double samples = one.samples + one.samples_every * static_cast<double>(k);
  const double samples_before = k > 0 ? samples - one.samples_every : row.samples_before;
  const int64_t since_start = std::max<int64_t>(step - start, 1);
  const Progress progress{since_start, row.counted + k - copied, std::min(step - before, since_start), samples,
                          samples - samples_before};
  return {row.segment, step <= start || (start > 0 && before == 0), progress};
}

}  // namespace shardow::posthoc
