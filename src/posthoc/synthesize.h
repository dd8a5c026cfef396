// What posthoc.h plans, made by the merge engine.
#pragma once

#include <filesystem>
#include <vector>

#include "posthoc/posthoc.h"
#include "shardow/merge.h"

namespace shardow::posthoc {

/// What merge() and load_merged() are given: every snapshot of the plan, opened.
std::vector<MergeInput> inputs_of(const Plan& plan);

/// merge() of them, by default in the dtype that the averages were tracked in. Collective: every rank gives the same
/// plan.
MergeReport synthesize(Group& group, const Plan& plan, const std::filesystem::path& out, MergeOptions options = {});

}  // namespace shardow::posthoc
