#include "shardow/schedule.h"

#include <nanobind/operators.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "average/schedule_table.h"
#include "core.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {

void bind_schedule(nb::module_& m) {
  nb::class_<Schedule>(m, "Schedule",
                       "How much of the old average survives each update. Made by the functions of shardow.schedules.")
      .def_static(
          "make",
          [](std::string_view kind, const std::map<std::string, double>& numbers) {
            return average::Schedules::make(kind, {numbers.begin(), numbers.end()});
          },
          "kind"_a, "numbers"_a, "A schedule by the name of its kind, as in its JSON.")
      .def_static("from_json", &Schedule::from_json, "json"_a)
      .def("to_json", &Schedule::to_json)
      .def("key", &Schedule::key,
           "\"0.9999\" for a constant decay, else the kind with its numbers: \"power(sigma_rel=0.1)\". Names an "
           "average.")
      .def(
          "factors",
          [](const Schedule& schedule, int64_t step, int64_t updates, int64_t delta, double samples,
             double delta_samples) {
            const Factors factors = schedule.factors({step, updates, delta, samples, delta_samples});
            return std::pair(factors.decay, factors.weight);
          },
          "step"_a, "updates"_a, "delta"_a = 1, "samples"_a = 0.0, "delta_samples"_a = 0.0,
          "(decay, weight) in float64 of the update at `step` (the first is 1), after `updates` applied ones.")
      .def("__getstate__", &Schedule::to_json)
      .def("__setstate__",
           [](Schedule& self, std::string_view json) { new (&self) Schedule(Schedule::from_json(json)); })
      .def(
          "__deepcopy__", [](nb::handle self, nb::handle) { return nb::borrow(self); }, "memo"_a,
          nb::sig("def __deepcopy__(self, memo: dict, /) -> Schedule"), "Itself: a schedule never changes.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__", [](const Schedule& schedule) { return "Schedule(" + schedule.to_json() + ")"; });
}

}  // namespace shardow::python
