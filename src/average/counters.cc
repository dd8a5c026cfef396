// {"format":1,"step":..,"updates":..,"applied_step":..,"applied_samples":..,"held_non_finite":..,"seed":"..",
//  "update_every":..,"start_step":..,"rule":"lerp","rounding":"auto","dtype":"F32","schedules":[{..},..]}
// The seed is a string: JSON readers elsewhere keep 53 bits of a number.
#include "average/counters.h"

#include <fmt/format.h>

#include <algorithm>
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

template <typename Value>
using Names = std::vector<std::pair<Value, std::string_view>>;

const Names<Rule> kRules = {{Rule::kLerp, "lerp"},
                            {Rule::kMulAdd, "mul_add"},
                            {Rule::kTwoProducts, "two_products"},
                            {Rule::kDifference, "difference"},
                            {Rule::kFusedDifference, "fused_difference"},
                            {Rule::kQuotient, "quotient"}};
const Names<Rounding> kRoundings = {
    {Rounding::kAuto, "auto"}, {Rounding::kNearest, "nearest"}, {Rounding::kStochastic, "stochastic"}};

template <typename Value>
std::string_view name_of(const Names<Value>& names, Value value) {
  return std::find_if(names.begin(), names.end(), [&](const auto& one) { return one.first == value; })->second;
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

  template <typename Value>
  Value one_of(std::string_view key, const Names<Value>& names) const {
    const std::string_view name = text(key);
    const auto found = std::find_if(names.begin(), names.end(), [&](const auto& one) { return one.second == name; });
    if (found == names.end()) bad(key, "a name that this version knows");
    return found->first;
  }

  std::string_view text(std::string_view key) const { return get<std::string_view>(key, "a string"); }

  uint64_t seed(std::string_view key) const {
    constexpr const char* kExpected = "a string of decimal digits";
    const auto text = get<std::string_view>(key, kExpected);
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) bad(key, kExpected);
    return value;
  }

  DType dtype(std::string_view key) const {
    try {
      return dtype_from_name(text(key));
    } catch (const Error&) {
      bad(key, "the name of a dtype");
    }
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
      counters.held_non_finite, options.seed, options.update_every, options.start_step, name_of(kRules, options.rule),
      name_of(kRoundings, options.rounding), dtype_name(options.dtype), schedules);
}

State state_from_json(std::string_view json) {
  const Fields fields(json);
  if (const int64_t format = fields.count("format"); format != kFormat) {
    base::fail(Code::kUnsupported, "saved state has format {}; this version reads format {}", format, kFormat);
  }
  State state;
  state.counters = {fields.count("step"), fields.count("updates"), fields.count("applied_step"),
                    fields.number("applied_samples"), fields.count("held_non_finite")};
  check(state.counters, json);
  state.options.schedules = fields.schedules("schedules");
  state.options.seed = fields.seed("seed");
  state.options.update_every = fields.count("update_every");
  if (state.options.update_every < 1) base::fail(Code::kCorrupt, "saved state: update_every is 0 in {}", json);
  state.options.start_step = fields.count("start_step");
  state.options.rule = fields.one_of("rule", kRules);
  state.options.rounding = fields.one_of("rounding", kRoundings);
  state.options.dtype = fields.dtype("dtype");
  return state;
}

std::vector<Schedule> schedules_in(std::string_view json) {
  return Fields(json).schedules("schedules");
}

bool are_settable(const Schedule& first, const Schedule& second) {
  return Schedules::is_settable(first) && Schedules::is_settable(second);
}

std::vector<std::pair<std::string, std::string>> named(const AverageOptions& options) {
  std::vector<std::pair<std::string, std::string>> all = {{"schedules", std::to_string(options.schedules.size())}};
  for (size_t k = 0; k < options.schedules.size(); ++k)
    all.emplace_back(options.schedules.size() == 1 ? "schedule" : fmt::format("schedule/{}", k),
                     options.schedules[k].to_json());
  all.emplace_back("rule", name_of(kRules, options.rule));
  all.emplace_back("rounding", name_of(kRoundings, options.rounding));
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
  for (size_t k = 0; k < std::min(file.schedules.size(), own.schedules.size()); ++k) {
    if (are_settable(file.schedules[k], own.schedules[k])) compared.schedules[k] = file.schedules[k];
  }
  std::vector<OptionDifference> found;
  for (auto& [name, text] : named(compared)) {
    if (const auto other = of_file.find(name); other != of_file.end() && other->second != text)
      found.push_back({name, other->second, std::move(text)});
  }
  return found;
}

AverageOptions with_options_of(const AverageOptions& file, AverageOptions own) {
  own.schedules = file.schedules;
  own.rule = file.rule;
  own.rounding = file.rounding;
  own.update_every = file.update_every;
  own.start_step = file.start_step;
  own.seed = file.seed;
  return own;
}

}  // namespace shardow::average
