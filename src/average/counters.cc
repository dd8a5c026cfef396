// {"format":1,"step":..,"updates":..,"applied_step":..,"applied_samples":..,"held_non_finite":..,"seed":"..",
//  "update_every":..,"start_step":..,"rule":"lerp","rounding":"auto","dtype":"F32","schedules":[{..},..]}
// The seed is a string: JSON readers elsewhere keep 53 bits of a number.
#include "average/counters.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <utility>

#include "average/json.h"
#include "average/schedule_table.h"
#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

constexpr int64_t kFormat = 1;

// In the order of their enumerators.
constexpr std::array<std::string_view, 6> kRules = {"lerp",       "mul_add",          "two_products",
                                                    "difference", "fused_difference", "quotient"};
constexpr std::array<std::string_view, 3> kRoundings = {"auto", "nearest", "stochastic"};

std::string_view name_of(Rule rule) {
  return kRules[static_cast<size_t>(rule)];
}
std::string_view name_of(Rounding rounding) {
  return kRoundings[static_cast<size_t>(rounding)];
}

/// Reads fields of one JSON object; each must be there, of its type and in range.
class Fields {
 public:
  explicit Fields(std::string_view json) : json_(json) {
    const auto object = object_in(parser_, json);
    if (!object) base::fail(Code::kCorrupt, "saved state is not a JSON object: {}", json);
    object_ = *object;
  }

  int64_t count(std::string_view key) const {
    constexpr const char* kExpected = "a whole number of 0 or more";
    const auto value = get<int64_t>(key, kExpected);
    if (value < 0) bad(key, kExpected);
    return value;
  }

  double number(std::string_view key) const { return get<double>(key, "a number"); }

  template <typename Value, size_t kCount>
  Value one_of(std::string_view key, const std::array<std::string_view, kCount>& names) const {
    const auto found = std::find(names.begin(), names.end(), get<std::string_view>(key, "a string"));
    if (found == names.end()) bad(key, "a name that this version knows");
    return static_cast<Value>(found - names.begin());
  }

  uint64_t seed(std::string_view key) const {
    constexpr const char* kExpected = "a string of decimal digits";
    const auto text = get<std::string_view>(key, kExpected);
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) bad(key, kExpected);
    return value;
  }

  DType dtype(std::string_view key) const {
    const std::optional<DType> known = find_dtype(get<std::string_view>(key, "a string"));
    if (!known) bad(key, "the name of a dtype");
    return *known;
  }

  std::vector<Schedule> schedules(std::string_view key) const {
    std::vector<Schedule> result;
    for (const simdjson::dom::element one : get<simdjson::dom::array>(key, "an array"))
      result.push_back(Schedule::from_json(simdjson::minify(one)));
    return result;
  }

 private:
  template <typename Value>
  Value get(std::string_view key, std::string_view expected) const {
    Value value{};
    if (object_[key].get(value) != simdjson::SUCCESS) bad(key, expected);
    return value;
  }

  [[noreturn]] void bad(std::string_view key, std::string_view expected) const {
    base::fail(Code::kCorrupt, "saved state: \"{}\" must be {} in {}", key, expected, json_);
  }

  simdjson::dom::parser parser_;
  simdjson::dom::object object_;
  std::string_view json_;
};

/// What next_step() and the schedules take for granted: a step that is not counted yet would never come, or come twice.
void check(const Counters& counters, std::string_view json) {
  if (counters.applied_step > counters.step) {
    base::fail(Code::kCorrupt, "saved state: applied_step {} is after step {} in {}", counters.applied_step,
               counters.step, json);
  }
  if (counters.updates > counters.applied_step) {
    base::fail(Code::kCorrupt, "saved state: {} updates by applied_step {}, at most one a step, in {}",
               counters.updates, counters.applied_step, json);
  }
  if (!std::isfinite(counters.applied_samples) || counters.applied_samples < 0) {
    base::fail(Code::kCorrupt, "saved state: applied_samples is {} in {}", counters.applied_samples, json);
  }
}

}  // namespace

std::string to_json(const AverageOptions& options, const Counters& counters) {
  std::string schedules;
  for (const Schedule& schedule : options.schedules) schedules += (schedules.empty() ? "" : ",") + schedule.to_json();
  return fmt::format(
      R"({{"format":{},"step":{},"updates":{},"applied_step":{},"applied_samples":{},"held_non_finite":{},"seed":"{}",)"
      R"("update_every":{},"start_step":{},"rule":"{}","rounding":"{}","dtype":"{}","schedules":[{}]}})",
      kFormat, counters.step, counters.updates, counters.applied_step, counters.applied_samples,
      counters.held_non_finite, options.seed, options.update_every, options.start_step, name_of(options.rule),
      name_of(options.rounding), dtype_name(options.dtype), schedules);
}

State state_from_json(std::string_view json, AverageOptions own) {
  const Fields fields(json);
  if (const int64_t format = fields.count("format"); format != kFormat) {
    base::fail(Code::kUnsupported, "saved state has format {}; this version reads format {}", format, kFormat);
  }
  State state{{}, std::move(own)};
  state.counters = {fields.count("step"), fields.count("updates"), fields.count("applied_step"),
                    fields.number("applied_samples"), fields.count("held_non_finite")};
  check(state.counters, json);
  state.options.schedules = fields.schedules("schedules");
  state.options.seed = fields.seed("seed");
  state.options.update_every = fields.count("update_every");
  if (state.options.update_every < 1) base::fail(Code::kCorrupt, "saved state: update_every is 0 in {}", json);
  state.options.start_step = fields.count("start_step");
  state.options.rule = fields.one_of<Rule>("rule", kRules);
  state.options.rounding = fields.one_of<Rounding>("rounding", kRoundings);
  state.options.dtype = fields.dtype("dtype");
  return state;
}

std::vector<Schedule> schedules_in(std::string_view json) {
  return Fields(json).schedules("schedules");
}

void take_settable(const std::vector<Schedule>& from, std::vector<Schedule>& into) {
  for (size_t k = 0; k < std::min(from.size(), into.size()); ++k) {
    if (Schedules::is_settable(from[k]) && Schedules::is_settable(into[k])) into[k] = from[k];
  }
}

std::vector<std::pair<std::string, std::string>> named(const AverageOptions& options) {
  std::vector<std::pair<std::string, std::string>> all = {{"schedules", std::to_string(options.schedules.size())}};
  for (size_t k = 0; k < options.schedules.size(); ++k)
    all.emplace_back(options.schedules.size() == 1 ? "schedule" : fmt::format("schedule/{}", k),
                     options.schedules[k].to_json());
  all.emplace_back("rule", name_of(options.rule));
  all.emplace_back("rounding", name_of(options.rounding));
  all.emplace_back("update_every", std::to_string(options.update_every));
  all.emplace_back("start_step", std::to_string(options.start_step));
  all.emplace_back("seed", std::to_string(options.seed));
  all.emplace_back("dtype", dtype_name(options.dtype));
  return all;
}

std::vector<OptionDifference> differences(const AverageOptions& file, const AverageOptions& own) {
  std::map<std::string, std::string> of_file;
  for (auto& [name, text] : named(file)) of_file[name] = std::move(text);
  AverageOptions compared = own;
  take_settable(file.schedules, compared.schedules);
  std::vector<OptionDifference> found;
  for (auto& [name, text] : named(compared)) {
    if (const auto other = of_file.find(name); other != of_file.end() && other->second != text)
      found.push_back({name, other->second, std::move(text)});
  }
  return found;
}

}  // namespace shardow::average
