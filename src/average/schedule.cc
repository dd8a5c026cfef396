// A schedule is a row of the table and its numbers; making, checking, writing and reading one are the same for every
// kind.
#include "shardow/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "average/schedule_table.h"
#include "base/errors.h"
#include "base/float_environment.h"
#include "base/json_object.h"

namespace shardow {
namespace {

using average::Kind;
using average::Parameter;
using average::Schedules;
using base::fail;

size_t find_kind(std::string_view name) {
  const auto table = average::schedule_table();
  for (size_t i = 0; i < table.size(); ++i) {
    if (table[i].name == name) return i;
  }
  fail(Code::kInvalidArgument, "no schedule is called '{}'; there are {}", name, fmt::join(Schedules::kinds(), ", "));
}

void check(const Kind& kind, const Parameter& parameter, double value) {
  const auto& [least, most, whole, positive] = parameter.range;
  const bool defaulted = value == parameter.otherwise;  // a default may be infinite
  const bool fits = value >= least && value <= most && !(positive && value == least) &&
                    !(whole && value != std::floor(value)) && std::isfinite(value);
  if (!fits && !defaulted) {
    fail(Code::kInvalidArgument, "schedule {}: {} is {}; it must be {} in {}{}, {}]", kind.name, parameter.name, value,
         whole ? "a whole number" : "a number", positive ? "(" : "[", least, most);
  }
}

/// Returns the number as text; -0 is 0, which is equal to it.
std::string text_of(double number) {
  return fmt::format("{}", number + 0.0);
}

[[noreturn]] void corrupt(std::string_view json, std::string_view why) {
  fail(Code::kCorrupt, "not a schedule, {}: {}", why, json);
}

}  // namespace

Schedule average::Schedules::make(std::string_view kind, const Numbers& numbers) {
  const size_t row = find_kind(kind);
  const Kind& known = average::schedule_table()[row];
  std::vector<double> values;
  for (const Parameter& parameter : known.parameters) {
    const auto number = numbers.find(parameter.name);
    if (number == numbers.end() && std::isnan(parameter.otherwise))
      fail(Code::kInvalidArgument, "schedule {} needs {}", kind, parameter.name);
    values.push_back(number == numbers.end() ? parameter.otherwise : number->second);
    check(known, parameter, values.back());
    if (known.rising && values.size() > 1 && values.back() < values.end()[-2]) {
      fail(Code::kInvalidArgument, "schedule {}: {} is {}, below {}, which is {}", kind, parameter.name, values.back(),
           known.parameters[values.size() - 2].name, values.end()[-2]);
    }
  }
  for (const auto& [name, value] : numbers) {
    const auto named = [&name = name](const Parameter& parameter) { return parameter.name == name; };
    if (std::none_of(known.parameters.begin(), known.parameters.end(), named))
      fail(Code::kInvalidArgument, "schedule {} has no number '{}'", kind, name);
  }
  return Schedule(row, std::move(values));
}

std::vector<std::string_view> average::Schedules::kinds() {
  std::vector<std::string_view> names;
  for (const Kind& kind : average::schedule_table()) names.push_back(kind.name);
  return names;
}

bool average::Schedules::is_settable(const Schedule& schedule) {
  return average::schedule_table()[schedule.kind_].settable;
}

std::string Schedule::to_json() const {
  const Kind& kind = average::schedule_table()[kind_];
  std::string json = fmt::format(R"({{"kind":"{}")", kind.name);
  for (size_t i = 0; i < numbers_.size(); ++i) {
    if (std::isfinite(numbers_[i])) json += fmt::format(R"(,"{}":{})", kind.parameters[i].name, numbers_[i]);
  }
  return json + "}";
}

std::string Schedule::key() const {
  const Kind& kind = average::schedule_table()[kind_];
  if (kind.name == "constant") return text_of(numbers_[0]);
  if (kind.settable) return std::string(kind.name);
  std::string numbers;
  for (size_t i = 0; i < numbers_.size(); ++i) {
    if (std::isfinite(numbers_[i]))
      numbers += fmt::format("{}{}={}", numbers.empty() ? "" : ",", kind.parameters[i].name, text_of(numbers_[i]));
  }
  return fmt::format("{}({})", kind.name, numbers);
}

Schedule Schedule::from_json(std::string_view json) {
  simdjson::dom::parser parser;
  const auto parsed = base::object_in(parser, json);
  if (!parsed) corrupt(json, "no JSON object");
  const simdjson::dom::object& object = *parsed;
  std::string_view kind;
  if (object["kind"].get(kind) != simdjson::SUCCESS) corrupt(json, "no \"kind\"");
  Schedules::Numbers numbers;
  std::set<std::string_view> seen;
  for (const auto field : object) {
    if (!seen.insert(field.key).second) corrupt(json, "a key stands twice");
    if (field.key == "kind") continue;
    double value = 0;
    if (field.value.get(value) != simdjson::SUCCESS) corrupt(json, "a value is no number");
    numbers.emplace(field.key, value);
  }
  try {
    return Schedules::make(kind, numbers);
  } catch (const Error& error) {
    corrupt(json, error.what());
  }
}

Factors Schedule::factors(const Progress& progress) const {
  if (progress.step < 1 || progress.delta < 1 || progress.updates < 0) {
    fail(Code::kInvalidArgument, "step {}, delta {}, updates {}: steps count from 1", progress.step, progress.delta,
         progress.updates);
  }
  const base::FloatEnvironment environment;
  Progress within = progress;
  within.delta = std::min(progress.delta, progress.step);
  return average::schedule_table()[kind_].factors(numbers_, within);
}

Schedule Schedule::in_order(std::string_view kind, std::initializer_list<double> numbers) {
  Schedules::Numbers named;
  auto parameter = average::schedule_table()[find_kind(kind)].parameters.begin();
  for (const double number : numbers) named.emplace(parameter++->name, number);
  return Schedules::make(kind, named);
}

}  // namespace shardow
