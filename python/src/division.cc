#include "average/division.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "core.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

using Places = std::vector<std::pair<int, int>>;
using Step = std::pair<size_t, std::vector<std::vector<std::tuple<size_t, int64_t, int64_t>>>>;

std::vector<ReplicaLevel> levels_of(const Places& places) {
  std::vector<ReplicaLevel> levels;
  for (const auto& [index, count] : places) levels.push_back({index, count});
  return levels;
}

std::pair<Region, int64_t> owned_part(const Region& region, const Places& levels) {
  const auto [part, begin] = owned(region, levels_of(levels));
  return {part, begin};
}

std::vector<Step> steps(const std::vector<std::tuple<Region, int64_t, int64_t>>& tensors, const Places& levels) {
  std::vector<Divided> divided;
  for (const auto& [region, itemsize, kind] : tensors) divided.push_back({region, itemsize, kind});
  std::vector<Step> found;
  for (const ExchangeStep& step : plan_exchange(divided, levels_of(levels))) {
    auto& members = found.emplace_back(step.level, step.members.size()).second;
    for (size_t member = 0; member < members.size(); ++member) {
      for (const auto& [tensor, begin, end] : step.members[member]) members[member].emplace_back(tensor, begin, end);
    }
  }
  return found;
}

}  // namespace

void bind_division(nb::module_& m) {
  m.def("owned", &owned_part, "region"_a, "levels"_a,
        "(part, begin): what this rank owns of a region that replicas hold, from element `begin` of its local memory. "
        "`levels`: (index, "
        "count) of the nested groups that divide it, in order.");
  m.def(
      "plan_exchange", &steps, "tensors"_a, "levels"_a,
      "[(level, [member's [(tensor, begin, end)]])]: collectives after which every replica has what every other owns, "
      "as stretches of "
      "local memory. `tensors`: (region, bytes of an element, kind), of which those of one kind may travel together.");
}

}  // namespace shardow::python
