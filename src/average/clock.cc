// {"format":1,"step":..,"updates":..,"applied_step":..,"applied_samples":..,"held_non_finite":..,"seed":"..",
//  "update_every":..,"start_step":..,"rule":"lerp","rounding":"auto","dtype":"F32","schedules":[{..},..]}
// The seed is a string: JSON readers elsewhere keep 53 bits of a number.
#include "average/clock.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <utility>

#include "average/checks.h"
#include "average/schedule_table.h"
#include "base/errors.h"
#include "base/json_object.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

using base::fail;
using kernels::Form;

constexpr int64_t kFormat = 1;

/// Below this weight the increment of a quiet float32 weight is lost to rounding (docs/numerics.md), so kAuto rounds it
/// stochastically.
constexpr double kStochasticBelow = 5e-5;

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

Form form_of(const AverageOptions& options, double weight) {
  constexpr Form kForms[] = {
      Form::kLerp,       Form::kMulAdd,          Form::kTwoProducts,
      Form::kDifference, Form::kFusedDifference, Form::kQuotient};  // of the rules, in their order
  const Form form = kForms[static_cast<size_t>(options.rule)];
  if (form != Form::kLerp) return form;
  if (weight == 1) return Form::kCopy;
  const bool stochastic =
      options.rounding == Rounding::kStochastic || (options.rounding == Rounding::kAuto && weight < kStochasticBelow);
  return stochastic && weight > 0 ? Form::kStochastic : form;
}

/// Reads fields of one JSON object; each must be present, of its type and in range.
class Fields {
 public:
  explicit Fields(std::string_view json) : json_(json) {
    const auto object = base::object_in(parser_, json);
    if (!object) fail(Code::kCorrupt, "saved state is not a JSON object: {}", json);
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
    const auto name = std::find(names.begin(), names.end(), get<std::string_view>(key, "a string"));
    if (name == names.end()) bad(key, "a name that this version knows");
    return static_cast<Value>(name - names.begin());
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
    for (const simdjson::dom::element schedule : get<simdjson::dom::array>(key, "an array"))
      result.push_back(Schedule::from_json(simdjson::minify(schedule)));
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
    fail(Code::kCorrupt, "saved state: \"{}\" must be {} in {}", key, expected, json_);
  }

  simdjson::dom::parser parser_;
  simdjson::dom::object object_;
  std::string_view json_;
};

/// Checks what Clock::next() and the schedules assume: with other counters a step would never come, or come twice.
void check(const Counters& counters, std::string_view json) {
  if (counters.applied_step > counters.step) {
    fail(Code::kCorrupt, "saved state: applied_step {} is after step {} in {}", counters.applied_step, counters.step,
         json);
  }
  if (counters.updates > counters.applied_step) {
    fail(Code::kCorrupt, "saved state: {} updates by applied_step {}, at most one a step, in {}", counters.updates,
         counters.applied_step, json);
  }
  if (!std::isfinite(counters.applied_samples) || counters.applied_samples < 0) {
    fail(Code::kCorrupt, "saved state: applied_samples is {} in {}", counters.applied_samples, json);
  }
}

/// Copies schedules where both are Schedule::settable(): set_decay() made their decays, which are state and no option.
void take_settable(const std::vector<Schedule>& from, std::vector<Schedule>& into) {
  for (size_t k = 0; k < std::min(from.size(), into.size()); ++k) {
    if (Schedules::is_settable(from[k]) && Schedules::is_settable(into[k])) into[k] = from[k];
  }
}

}  // namespace

int64_t Clock::next(std::optional<int64_t> step) const {
  constexpr int64_t kMost = int64_t{1} << 62;
  if (const int64_t last = step.value_or(counters.step); last >= kMost)
    fail(Code::kInvalidArgument, "update(step={}): steps are below 2^62", last);
  if (!step) return counters.step + 1;
  if (*step <= counters.step) {
    fail(Code::kInvalidArgument,
         "update(step={}): step {} has been counted already; pass the number of optimizer steps taken, each once",
         *step, counters.step);
  }
  return *step;
}

bool Clock::copies_at(int64_t step) const noexcept {
  return step <= options.start_step || (options.start_step > 0 && counters.applied_step == 0);
}

bool Clock::skips(int64_t step) const noexcept {
  return !copies_at(step) && step - counters.applied_step < options.update_every;
}

Progress Clock::progress(int64_t step, double samples) const noexcept {
  const int64_t since_start = std::max<int64_t>(step - options.start_step, 1);
  return {since_start, counters.updates, std::min(step - counters.applied_step, since_start), samples,
          samples - counters.applied_samples};
}

kernels::Step Clock::plan(int64_t step, double samples, std::span<const Factors> factors) const {
  kernels::Step planned{};
  planned.num_averages = static_cast<int32_t>(options.schedules.size());
  planned.hold = options.non_finite != NonFinite::kPropagate;
  planned.seed = options.seed;
  planned.step = step;
  for (size_t k = 0; k < options.schedules.size(); ++k) {
    if (copies_at(step)) {
      planned.averages[k] = {Form::kCopy, 0, 1};
    } else {
      const auto [decay, weight] = factors.empty() ? options.schedules[k].factors(progress(step, samples)) : factors[k];
      planned.averages[k] = {form_of(options, weight), decay, weight};
    }
  }
  return planned;
}

bool Clock::draws_noise(const kernels::Step& step) const noexcept {
  const bool narrow = dtype_bits(options.dtype) == 16;
  const auto draws = [&](const kernels::Step::One& average) {
    return average.form == Form::kStochastic || (narrow && average.form == Form::kLerp);
  };
  return std::any_of(step.averages.begin(), step.averages.begin() + step.num_averages, draws);
}

void Clock::count(int64_t step, double samples) noexcept {
  counters.step = step;
  counters.applied_step = step;
  counters.applied_samples = samples;
  if (step > options.start_step) ++counters.updates;
}

std::vector<double> Clock::decays() const {
  Progress alone = progress(counters.step + 1, counters.applied_samples + 1);
  alone.delta = 1;
  std::vector<double> decays;
  for (const Schedule& schedule : options.schedules) {
    try {
      decays.push_back(schedule.factors(alone).decay);
    } catch (const Error&) {
      decays.push_back(std::nan(""));
    }
  }
  return decays;
}

Clock Clock::with(const Clock& saved, OptionsFrom from, bool of_kernels) const {
  if (saved.options.schedules.size() != options.schedules.size()) {
    fail(Code::kInvalidArgument,
         "the saved state has {} averages of each parameter, this one keeps {}; make it with the same number of decays",
         saved.options.schedules.size(), options.schedules.size());
  }
  Clock made{saved.counters, from == OptionsFrom::kFile ? saved.options : options};
  made.options.dtype = options.dtype;  // the memory's
  if (from == OptionsFrom::kOwn) return (take_settable(saved.options.schedules, made.options.schedules), made);
  try {
    check_options(made.options, of_kernels);
  } catch (const Error& error) {
    fail(error.code(),
         "the saved state's options do not fit averages of dtype {} (go on with your own options instead): {}",
         dtype_name(options.dtype), error.what());
  }
  return made;
}

std::string Clock::to_json() const {
  std::string schedules;
  for (const Schedule& schedule : options.schedules) schedules += (schedules.empty() ? "" : ",") + schedule.to_json();
  return fmt::format(
      R"({{"format":{},"step":{},"updates":{},"applied_step":{},"applied_samples":{},"held_non_finite":{},"seed":"{}",)"
      R"("update_every":{},"start_step":{},"rule":"{}","rounding":"{}","dtype":"{}","schedules":[{}]}})",
      kFormat, counters.step, counters.updates, counters.applied_step, counters.applied_samples,
      counters.held_non_finite, options.seed, options.update_every, options.start_step, name_of(options.rule),
      name_of(options.rounding), dtype_name(options.dtype), schedules);
}

Clock clock_from_json(std::string_view json, AverageOptions own) {
  const Fields fields(json);
  if (const int64_t format = fields.count("format"); format != kFormat) {
    fail(Code::kUnsupported, "saved state has format {}; this version reads format {}", format, kFormat);
  }
  Clock saved{{}, std::move(own)};
  saved.counters = {fields.count("step"), fields.count("updates"), fields.count("applied_step"),
                    fields.number("applied_samples"), fields.count("held_non_finite")};
  check(saved.counters, json);
  saved.options.schedules = fields.schedules("schedules");
  saved.options.seed = fields.seed("seed");
  saved.options.update_every = fields.count("update_every");
  if (saved.options.update_every < 1) fail(Code::kCorrupt, "saved state: update_every is 0 in {}", json);
  saved.options.start_step = fields.count("start_step");
  saved.options.rule = fields.one_of<Rule>("rule", kRules);
  saved.options.rounding = fields.one_of<Rounding>("rounding", kRoundings);
  saved.options.dtype = fields.dtype("dtype");
  return saved;
}

std::vector<Schedule> schedules_in(std::string_view json) {
  return Fields(json).schedules("schedules");
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
  std::vector<OptionDifference> result;
  for (auto& [name, text] : named(compared)) {
    if (const auto other = of_file.find(name); other != of_file.end() && other->second != text)
      result.push_back({name, other->second, std::move(text)});
  }
  return result;
}

}  // namespace shardow::average
