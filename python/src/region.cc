#include "shardow/region.h"

#include <nanobind/operators.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "average/replicas.h"
#include "core.h"
#include "shardow/placement.h"
#include "tensor/coverage.h"
#include "tensor/messages.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

using Pairs = std::vector<std::vector<std::pair<int64_t, int64_t>>>;

Region grid(Shape shape, const Pairs& dims) {
  std::vector<std::vector<Interval>> intervals;
  for (const auto& dim : dims) {
    auto& list = intervals.emplace_back();
    for (const auto& [begin, end] : dim) list.push_back({begin, end});
  }
  return Region::grid(std::move(shape), std::move(intervals));
}

std::vector<std::tuple<int64_t, int64_t, int64_t>> runs(const Region& region) {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> found;
  region.for_each_run([&](const Run& run) { found.emplace_back(run.global_begin, run.local_begin, run.length); });
  return found;
}

std::vector<std::tuple<Shape, Shape, int64_t>> boxes(const Region& region) {
  std::vector<std::tuple<Shape, Shape, int64_t>> found;
  for (const Box& box : region.boxes()) found.emplace_back(box.offsets, box.sizes, box.local_begin);
  return found;
}

nb::bytes encoded(const Region& region) {
  return to_bytes(region.encode());
}

std::pair<Region, int64_t> owned_part(const Region& region, const std::vector<std::pair<int, int>>& places) {
  std::vector<average::ReplicaLevel> levels;
  for (const auto& [index, count] : places) levels.push_back({index, count});
  const auto [part, begin] = average::owned(region, levels);
  return {part, begin};
}

}  // namespace

void bind_region(nb::module_& m) {
  nb::class_<Region>(
      m, "Region",
      "Which elements of a global tensor a rank holds: a grid of intervals, and a window of its row-major numbering.")
      .def_static("whole", &Region::whole, "shape"_a, "All of the tensor: a replica.")
      .def_static("grid", &grid, "shape"_a, "dims"_a,
                  "The cross product of dims[d], sorted disjoint (begin, end) pairs of each dimension.")
      .def("window", &Region::window, "begin"_a, "end"_a, "Elements [begin, end) of this region's own numbering.")
      .def("position", &Region::position, "element"_a,
           "How many of its elements come before one of the tensor, counted row-major.")
      .def("part", &Region::part, "index"_a, "count"_a, "align"_a = 16,
           "Part `index` of `count` near-equal windows, cut at multiples of `align`.")
      .def_prop_ro(
          "shape", [](const Region& r) { return nb::tuple(nb::cast(r.shape())); }, "Shape of the global tensor.")
      .def_prop_ro("size", &Region::size, "Elements held.")
      .def_prop_ro(
          "grid_shape", [](const Region& r) { return nb::tuple(nb::cast(r.grid_shape())); },
          "Shape of a shard's local tensor; a window is a stretch of that in row-major order.")
      .def_prop_ro("contiguous", &Region::contiguous, "At most one run.")
      .def("runs", &runs, "[(global_begin, local_begin, length)], in ascending order, in elements.")
      .def("boxes", &boxes, "[(offsets, sizes, local_begin)]: the region as axis-aligned boxes, in local order.")
      .def("encode", &encoded, "Bytes for another rank.")
      .def_static(
          "decode", [](const nb::bytes& data) { return Region::decode(text_of(data)); }, "data"_a)
      .def("__getstate__", &encoded)
      .def("__setstate__", [](Region& self, const nb::bytes& b) { new (&self) Region(Region::decode(text_of(b))); })
      .def(
          "__deepcopy__", [](nb::handle self, nb::handle) { return nb::borrow(self); }, "memo"_a,
          nb::sig("def __deepcopy__(self, memo: dict, /) -> Region"), "Itself: a region never changes.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__", [](const Region& r) { return "Region(" + r.to_string() + ")"; });
  m.def(
      "covers_once", [](const std::vector<Region>& regions) { return covers_once(regions); }, "regions"_a,
      "True if the regions, all of one shape, hold every element exactly once.");
  nb::class_<MessagePiece>(m, "MessagePiece",
                           "Elements of want number `want`, from `begin` on, `at` bytes from their message's start.")
      .def_ro("want", &MessagePiece::want)
      .def_ro("region", &MessagePiece::region)
      .def_ro("begin", &MessagePiece::begin)
      .def_ro("at", &MessagePiece::at)
      .def_ro("bytes", &MessagePiece::bytes);
  nb::class_<Messages>(m, "Messages",
                       "An iterator of lists of pieces: parts of tensors in messages of at most `most_bytes`.")
      .def(
          "__init__",
          [](Messages* self, size_t count, nb::callable wanted, int64_t most_bytes) {
            const auto one = [wanted = std::move(wanted)](size_t i) {
              auto [region, item_bytes] = nb::cast<std::pair<Region, int64_t>>(wanted(i));
              return Wanted{std::move(region), item_bytes};
            };
            new (self) Messages(count, one, most_bytes);
          },
          "count"_a, "wanted"_a, "most_bytes"_a = Messages::kMostBytes,
          "wanted(i) -> (region, bytes of an element), asked for each once.")
      .def(
          "__iter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __iter__(self) -> Messages"))
      .def("__next__", [](Messages& messages) {
        auto message = messages.next();
        if (!message) throw nb::stop_iteration();
        return std::move(*message);
      });
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
  m.def("owned", &owned_part, "region"_a, "levels"_a,
        "(part, begin): what this rank owns of a region that replicas hold, from element `begin` of its local memory. "
        "`levels`: (index, "
        "count) of the nested groups that divide it, in order.");
}

}  // namespace shardow::python
