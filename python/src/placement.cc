#include "shardow/placement.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {

void bind_placement(nb::module_& m) {
  nb::class_<Placement>(m, "Placement", "What one dimension of a mesh of ranks does to a tensor.")
      .def_static("replicate", &Placement::replicate)
      .def_static("shard", &Placement::shard, "dim"_a, "split_factor"_a = 1,
                  "`split_factor`: into how many parts later mesh dimensions cut `dim` before this one does.")
      .def_static("partial", &Placement::partial);
  m.def(
      "region_of",
      [](const std::string& name, const Shape& shape, const std::vector<std::pair<int64_t, int64_t>>& mesh,
         const std::vector<Placement>& placements) {
        std::vector<MeshDim> dims;
        for (const auto& [size, coordinate] : mesh) dims.push_back({size, coordinate});
        return region_of(name, shape, dims, placements);
      },
      "name"_a, "shape"_a, "mesh"_a, "placements"_a,
      "What the rank at `mesh`, (size, coordinate) of each dimension, holds of a tensor. Raises NotImplementedError "
      "for what no weight "
      "has.");
}

}  // namespace shardow::python
