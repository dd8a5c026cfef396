// {"format":1,"step":..,"updates":..,"applied_step":..,"applied_samples":..,"held_non_finite":..,"seed":"..","update_every":..,"start_step":..,
//  "rule":"lerp","rounding":"auto","dtype":"F32","schedules":[{..},..]}
// The seed is a string: JSON readers elsewhere keep 53 bits of a number.
#include "average/counters.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <charconv>

#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

constexpr int64_t kFormat = 1;

std::string_view rule_name(Rule rule) {
  switch (rule) {
    case Rule::kLerp: return "lerp";
    case Rule::kMulAdd: return "mul_add";
    case Rule::kTwoProducts: return "two_products";
    case Rule::kDifference: return "difference";
    case Rule::kFusedDifference: return "fused_difference";
    case Rule::kQuotient: return "quotient";
  }
  return "";
}

std::string_view rounding_name(Rounding rounding) {
  switch (rounding) {
    case Rounding::kAuto: return "auto";
    case Rounding::kNearest: return "nearest";
    case Rounding::kStochastic: return "stochastic";
  }
  return "";
}

/// Reads fields of one JSON object; each must be there, of its type and in range.
class Fields {
 public:
  Fields(simdjson::dom::object object, std::string_view json) : object_(object), json_(json) {}

  int64_t count(std::string_view key) const {
    int64_t value = 0;
    if (object_[key].get(value) != simdjson::SUCCESS || value < 0) bad(key, "a whole number of 0 or more");
    return value;
  }

  double number(std::string_view key) const {
    double value = 0;
    if (object_[key].get(value) != simdjson::SUCCESS) bad(key, "a number");
    return value;
  }

  uint64_t seed(std::string_view key) const {
    std::string_view text;
    uint64_t value = 0;
    if (object_[key].get(text) != simdjson::SUCCESS) bad(key, "a string of decimal digits");
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) bad(key, "a string of decimal digits");
    return value;
  }

  std::vector<Schedule> schedules(std::string_view key) const {
    simdjson::dom::array array;
    if (object_[key].get(array) != simdjson::SUCCESS) bad(key, "an array");
    std::vector<Schedule> result;
    for (const simdjson::dom::element one : array) result.push_back(Schedule::from_json(simdjson::minify(one)));
    return result;
  }

 private:
  [[noreturn]] void bad(std::string_view key, std::string_view expected) const {
    base::fail(Code::kCorrupt, "saved state: \"{}\" must be {} in {}", key, expected, json_);
  }

  simdjson::dom::object object_;
  std::string_view json_;
};

}  // namespace

std::string to_json(const AverageOptions& options, const Counters& counters) {
  std::string schedules;
  for (const Schedule& schedule : options.schedules) schedules += (schedules.empty() ? "" : ",") + schedule.to_json();
  return fmt::format(
      R"({{"format":{},"step":{},"updates":{},"applied_step":{},"applied_samples":{},"held_non_finite":{},"seed":"{}","update_every":{},)"
      R"("start_step":{},"rule":"{}","rounding":"{}","dtype":"{}","schedules":[{}]}})",
      kFormat, counters.step, counters.updates, counters.applied_step, counters.applied_samples, counters.held_non_finite, options.seed,
      options.update_every, options.start_step, rule_name(options.rule), rounding_name(options.rounding), dtype_name(options.dtype),
      schedules);
}

State state_from_json(std::string_view json) {
  simdjson::dom::parser parser;
  simdjson::dom::object object;
  if (parser.parse(simdjson::padded_string(json)).get(object) != simdjson::SUCCESS) {
    base::fail(Code::kCorrupt, "saved state is not a JSON object: {}", json);
  }
  const Fields fields(object, json);
  if (const int64_t format = fields.count("format"); format != kFormat) {
    base::fail(Code::kUnsupported, "saved state has format {}; this version reads format {}", format, kFormat);
  }
  State state;
  state.counters = {fields.count("step"), fields.count("updates"), fields.count("applied_step"), fields.number("applied_samples"),
                    fields.count("held_non_finite")};
  state.schedules = fields.schedules("schedules");
  state.seed = fields.seed("seed");
  state.update_every = fields.count("update_every");
  state.start_step = fields.count("start_step");
  return state;
}

}  // namespace shardow::average
