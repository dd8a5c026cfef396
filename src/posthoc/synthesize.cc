#include "posthoc/synthesize.h"

#include <fmt/format.h>

namespace shardow::posthoc {

std::vector<MergeInput> inputs_of(const Plan& plan) {
  std::vector<MergeInput> inputs;
  for (const Term& one : plan.terms)
    inputs.push_back({one.path.string(), Checkpoint::open(one.path), one.coefficient, one.step});
  return inputs;
}

MergeReport synthesize(Group& group, const Plan& plan, const std::filesystem::path& out, MergeOptions options) {
  if (!options.dtype) options.dtype = plan.dtype;
  options.formula =
      fmt::format("post-hoc {} at step {}: residual {:.3e}, error at most {:.3e} of each weight's span in training",
                  plan.target.key(), plan.step, plan.residual, plan.variation);
  return merge(group, inputs_of(plan), out, options);
}

}  // namespace shardow::posthoc
