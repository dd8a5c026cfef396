// {"format":1,"segments":[{"run":"9f3c","start_step":0,"schedules":{..},"updates":[[first, every, count, samples,
// samples_every], ..]}, ..]}; the last two numbers are left out where no schedule asks for samples. The first versions
// wrote format 2, too: segments of many stretches have "packed":{"crc32":"0123abcd","text":".."} in place of "updates".
#include "posthoc/record.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>

#include "average/clock.h"
#include "base/errors.h"
#include "base/json_object.h"
#include "file/crc.h"

namespace shardow::posthoc {
namespace {

using base::fail;
namespace dom = simdjson::dom;

constexpr int64_t kFormat = 2;
constexpr size_t kMostText = size_t{32} << 20;  // bytes of JSON: what kMostStretches take

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

/// Reads a packed text: "#" where samples are told, "." where not, then numbers as source maps have them (base64 VLQ:
/// five bits a letter, the lowest first, the sixth says that another letter follows; the lowest bit is the sign).
///
///   #  every  samples_every  then for each update   ["-" steps - every]  samples - samples_every, or "=" samples ";"
///   .  every                 then for each update   steps - every
///   "*" n                    n more updates as far apart as the last two
///
/// with the steps and samples since the update before, at first since 0.
class PackedReader {
 public:
  explicit PackedReader(std::string_view text) : text_(text) {}

  std::vector<Stretch> all() {
    const bool in_samples = takes('#');
    if (!in_samples && !takes('.')) damaged();
    const int64_t every = number(), samples_every = in_samples ? number() : 0;
    int64_t step = 0;
    double samples = 0;
    while (!text_.empty()) {
      if (takes('*')) {
        repeat(number());
      } else {
        step += every + (in_samples && !takes('-') ? 0 : number());
        if (in_samples) samples = takes('=') ? decimal() : samples + static_cast<double>(samples_every + number());
        add(step, samples);
      }
      step = found_.back().last(), samples = found_.back().samples_at_last();
      if (step < 1 || step >= kMostSteps || !(samples >= 0) || !std::isfinite(samples)) damaged();
      check_stretches(found_.size());
    }
    return std::move(found_);
  }

 private:
  [[noreturn]] static void damaged() { corrupt("its packed updates are damaged"); }

  bool takes(char letter) {
    if (text_.empty() || text_.front() != letter) return false;
    text_.remove_prefix(1);
    return true;
  }

  int64_t number() {
    constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint64_t bits = 0;
    size_t letter = 32;
    for (int shift = 0; letter >= 32; shift += 5) {
      letter = text_.empty() ? std::string_view::npos : kLetters.find(text_.front());
      if (letter == std::string_view::npos || shift > 50) damaged();
      bits |= static_cast<uint64_t>(letter & 31) << shift;
      text_.remove_prefix(1);
    }
    const auto size = static_cast<int64_t>(bits >> 1);
    return (bits & 1) != 0 ? -size : size;
  }

  double decimal() {
    double value = 0;
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), value);
    text_.remove_prefix(static_cast<size_t>(end - text_.data()));
    if (error != std::errc() || !takes(';')) damaged();
    return value;
  }

  void add(int64_t step, double samples) {
    if (!found_.empty()) {
      Stretch& last = found_.back();
      if (step <= last.last() || !(samples >= last.samples_at_last())) damaged();
      const bool second = last.count == 1;
      if (second) last.every = step - last.first, last.samples_every = samples - last.samples;
      if (second || (step == last.first + last.every * last.count &&
                     samples == last.samples + last.samples_every * static_cast<double>(last.count))) {
        ++last.count;
        return;
      }
    }
    found_.push_back({step, 1, 1, samples, 0});
  }

  void repeat(int64_t more) {
    if (found_.empty() || found_.back().count < 2 || more < 1) damaged();
    Stretch& last = found_.back();
    if (more > kMostUpdates) fail(Code::kUnsupported, "packed updates: more than {} of them", kMostUpdates);
    if (last.count + more > (kMostSteps - last.first) / last.every) damaged();
    last.count += more;
  }

  std::string_view text_;
  std::vector<Stretch> found_;
};

std::vector<Stretch> unpacked_from(const dom::object& packed) {
  const auto text = field<std::string_view>(packed, "text"), crc = field<std::string_view>(packed, "crc32");
  if (fmt::format("{:08x}", file::crc32(0, std::as_bytes(std::span(text)))) != crc)
    corrupt("the checksum of its updates differs");
  return PackedReader(text).all();
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
    for (const dom::element one : field<dom::array>(object, "updates")) {
      dom::array numbers;
      if (one.get(numbers) != simdjson::SUCCESS) corrupt("updates are lists of numbers");
      segment.updates.push_back(stretch_of(numbers));
    }
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
       "(update_every), or by steps alone",
       kRecordKey, count, kMostStretches);
}

Record record_from_json(std::string_view json) {
  if (json.size() > kMostText) {
    fail(Code::kUnsupported,
         "{} in a snapshot's metadata has {} bytes; {} are read, which tell a million stretches of updates", kRecordKey,
         json.size(), kMostText);
  }
  dom::parser parser;
  const auto object = base::object_in(parser, json);
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
  const average::Clock found = average::clock_from_json(state);
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
  for (Segment& segment : record) {
    std::erase_if(segment.updates, [&](const Stretch& stretch) { return stretch.first > step; });
    if (segment.updates.empty()) continue;
    Stretch& last = segment.updates.back();
    last.count = std::min(last.count, (step - last.first) / last.every + 1);
    if (last.count == 1) last.every = 1, last.samples_every = 0;  // as an update is told that is alone
  }
  drop_empty(record);
  return record;
}

bool same_past(const Record& a, const Record& b) {
  const auto same_stretch = [](const Stretch& x, const Stretch& y) {
    return x.first == y.first && x.count == y.count && (x.count == 1 || x.every == y.every);
  };
  return std::ranges::equal(a, b, [&](const Segment& x, const Segment& y) {
    return x.run == y.run && x.start_step == y.start_step && std::ranges::equal(x.updates, y.updates, same_stretch);
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
  Row next{};
  for (size_t s = 0; s < record_.size(); ++s) {
    const int64_t start = record_[s].start_step;
    for (const Stretch& stretch : record_[s].updates) {
      next.segment = s, next.stretch = stretch;
      rows_.push_back(next);
      next.begin += stretch.count;
      next.step_before = stretch.last();
      next.counted +=
          stretch.count -
          (stretch.first > start ? 0 : std::min(stretch.count, (start - stretch.first) / stretch.every + 1));
      next.samples_before = stretch.samples_at_last();
    }
  }
  size_ = next.begin;
}

int64_t Updates::until(int64_t step) const noexcept {
  int64_t made = 0;
  for (const Row& row : rows_) {
    if (row.stretch.first > step) break;
    made += std::min(row.stretch.count, (step - row.stretch.first) / row.stretch.every + 1);
  }
  return made;
}

Updates::Update Updates::at(int64_t i) const {
  const auto is_before = [](int64_t index, const Row& other) { return index < other.begin; };
  const Row& row = *(std::upper_bound(rows_.begin(), rows_.end(), i, is_before) - 1);
  const Stretch& one = row.stretch;
  const int64_t start = record_[row.segment].start_step, k = i - row.begin, step = one.first + k * one.every;
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
