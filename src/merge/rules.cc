// Which order a rule wants its inputs in, and what they weigh then.
#include "merge/rules.h"

#include <algorithm>
#include <tuple>

#include "base/errors.h"

namespace shardow {
namespace {

/// In the order of their steps, which must all be known.
std::vector<int64_t> in_time(std::vector<MergeInput>& inputs) {
  sort_by_step(inputs);
  return steps_of(inputs);
}

Coefficients of_ema(std::vector<MergeInput>& inputs, const MergeRule& rule) {
  if (rule.per_step) return ema_coefficients(in_time(inputs), rule.decay);
  if (std::any_of(inputs.begin(), inputs.end(), [](const MergeInput& input) { return input.step.has_value(); })) {
    in_time(inputs);
  } else if (!inputs.empty()) {
    inputs.back().newest = true;
  }
  return ema_coefficients(inputs.size(), rule.decay);
}

Coefficients of_weights(const std::vector<MergeInput>& inputs, const MergeRule& rule) {
  if (rule.weights.size() != inputs.size())
    base::fail(Code::kInvalidArgument, "{} weights for {} inputs", rule.weights.size(), inputs.size());
  return given_coefficients(rule.weights, rule.normalize);
}

Coefficients of_rule(std::vector<MergeInput>& inputs, const MergeRule& rule) {
  switch (rule.kind) {
    case MergeRule::Kind::kWeights: return of_weights(inputs, rule);
    case MergeRule::Kind::kEma: return of_ema(inputs, rule);
    case MergeRule::Kind::kLawa: in_time(inputs); return lawa_coefficients(inputs.size(), rule.last);
    case MergeRule::Kind::kCurve: return decay_coefficients(rule.curve, in_time(inputs));
    case MergeRule::Kind::kUniform: sort_by_step(inputs); return uniform_coefficients(inputs.size());
  }
  base::fail(Code::kInvalidArgument, "MergeRule::Kind: {} is none", static_cast<int>(rule.kind));
}

}  // namespace

size_t newest_of(std::span<const MergeInput> inputs) {
  if (inputs.empty()) base::fail(Code::kInvalidArgument, "nothing to merge: no inputs");
  const auto later = [](const MergeInput& a, const MergeInput& b) {
    return std::tie(a.newest, a.step, a.name) < std::tie(b.newest, b.step, b.name);
  };
  return static_cast<size_t>(std::max_element(inputs.begin(), inputs.end(), later) - inputs.begin());
}

Coefficients weigh(std::vector<MergeInput>& inputs, const MergeRule& rule) {
  Coefficients found = of_rule(inputs, rule);
  for (size_t j = 0; j < inputs.size(); ++j) inputs[j].coefficient = found.values[j];
  return found;
}

}  // namespace shardow
