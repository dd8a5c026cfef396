// Which step a checkpoint is of.
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <tuple>

#include "base/errors.h"
#include "ema/names.h"
#include "merge/rules.h"

namespace shardow {
namespace {

std::optional<int64_t> number_in(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

/// The member "step" of a JSON object; nothing where the text is anything else. Its other members are not looked at:
/// names of inputs are paths, which need not be Unicode.
std::optional<int64_t> step_in_json(const std::string& json) {
  simdjson::ondemand::parser parser;
  simdjson::ondemand::document document;
  const simdjson::padded_string text(json);
  int64_t step = 0;
  if (parser.iterate(text).get(document) != simdjson::SUCCESS || document["step"].get(step) != simdjson::SUCCESS ||
      step < 0)
    return std::nullopt;
  return step;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// "step-100", "global_step100", "ckpt_100", "iter_0000100.safetensors": the number behind the last such word; "100"
/// where `alone`: it may be a directory's name that says something else, such as a year.
std::optional<int64_t> step_in_word(std::string name, bool alone) {
  constexpr std::array<std::string_view, 6> kWords = {"step", "steps", "iter", "iteration", "checkpoint", "ckpt"};
  if (const size_t dot = name.rfind(".safetensors"); dot != std::string::npos) name.resize(dot);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::optional<int64_t> found;
  for (size_t begin = 0; begin < name.size(); ++begin) {
    if (!is_digit(name[begin])) continue;
    size_t end = begin;
    while (end < name.size() && is_digit(name[end])) ++end;
    std::string_view before(name.data(), begin);
    while (!before.empty() && (before.back() == '-' || before.back() == '_' || before.back() == '='))
      before.remove_suffix(1);
    const bool named =
        std::any_of(kWords.begin(), kWords.end(), [&](std::string_view word) { return before.ends_with(word); });
    if (named || (alone && begin == 0 && end == name.size()))
      found = number_in(std::string_view(name).substr(begin, end - begin));
    begin = end;
  }
  return found;
}

bool has_step(const MergeInput& input) {
  return input.step.has_value();
}

}  // namespace

std::optional<int64_t> step_of(const std::filesystem::path& path, const std::map<std::string, std::string>& metadata) {
  for (const char* key : {kStateKey, kMergeKey}) {
    if (const auto found = metadata.find(key); found != metadata.end()) {
      if (const auto step = step_in_json(found->second)) return step;
    }
  }
  for (const char* key : {"shardow.step", "step", "global_step"}) {
    if (const auto found = metadata.find(key); found != metadata.end()) {
      if (const auto step = number_in(found->second)) return step;
    }
  }
  constexpr int kParts = 3;  // step-100/ema/model.safetensors
  std::filesystem::path part = path.lexically_normal();
  if (!part.has_filename()) part = part.parent_path();  // "100/"
  for (int i = 0; i < kParts && !part.empty(); ++i) {
    if (const auto step = step_in_word(part.filename().string(), i == 0)) return step;
    if (part == part.parent_path()) break;
    part = part.parent_path();
  }
  return std::nullopt;
}

bool sort_by_step(std::vector<MergeInput>& inputs) {
  if (!std::all_of(inputs.begin(), inputs.end(), has_step)) return false;
  std::stable_sort(inputs.begin(), inputs.end(), [](const MergeInput& a, const MergeInput& b) {
    return std::tie(a.step, a.name) < std::tie(b.step, b.name);
  });
  return true;
}

std::vector<int64_t> steps_of(std::span<const MergeInput> inputs) {
  std::vector<int64_t> steps;
  std::vector<std::string> without;
  for (const MergeInput& input : inputs) {
    if (input.step) {
      steps.push_back(*input.step);
    } else {
      without.push_back(input.name);
    }
  }
  if (!without.empty())
    base::fail(Code::kInvalidArgument,
               "the steps of these inputs are not known: {}; give the steps of all inputs (steps=, --steps)",
               fmt::join(without, ", "));
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (steps[i] == steps[j])
        base::fail(Code::kInvalidArgument,
                   "{} and {} are both of step {}; give the steps of all inputs (steps=, --steps)", inputs[j].name,
                   inputs[i].name, steps[i]);
    }
  }
  return steps;
}

}  // namespace shardow
