// Averages after the fact: plans and sweeps, which read headers alone, and what is made of a plan.
#include "posthoc/posthoc.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "callbacks.h"
#include "file_options.h"
#include "posthoc/snapshots.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

/// Ctrl-C, while the engine works without the GIL.
void signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

nb::dict synthesize(Group& group, const posthoc::Plan& plan, const std::filesystem::path& path,
                    const std::optional<std::string>& dtype, int64_t max_shard_size, double timeout,
                    const nb::object& progress) {
  Callbacks callbacks;
  const auto options = writing<MergeOptions>(dtype, max_shard_size, {}, timeout, callbacks.progress(progress));
  MergeReport report;
  callbacks.run([&] { report = posthoc::synthesize(group, plan, path, options); });
  nb::dict result = written(report);
  result["bytes_read"] = report.bytes_read;
  return result;
}

}  // namespace

void bind_posthoc(nb::module_& m) {
  using posthoc::Plan, posthoc::Sweep, posthoc::SweepPoint, posthoc::Term;
  m.attr("RECORD_KEY") = posthoc::kRecordKey;
  nb::class_<Term>(m, "PosthocTerm", "One snapshot's share.")
      .def_ro("path", &Term::path)
      .def_ro("key", &Term::key, "Of the average.")
      .def_ro("step", &Term::step)
      .def_ro("coefficient", &Term::coefficient);
  nb::class_<Plan>(m, "PosthocPlan",
                   "Which snapshots, with which coefficients, and how near their sum comes to what was asked for.")
      .def_ro("target", &Plan::target)
      .def_ro("step", &Plan::step)
      .def_ro("terms", &Plan::terms, "By step; their coefficients sum to 1.")
      .def_ro("snapshots", &Plan::snapshots, "How many there were to choose from.")
      .def_ro("residual", &Plan::residual,
              "Distance of the profiles, made from asked for, over the norm of what was asked for.")
      .def_ro("variation", &Plan::variation,
              "Half of the sum of the profiles' absolute differences: no weight is further off than this part of the "
              "span that it covered "
              "in training.")
      .def_ro("rounding", &Plan::rounding,
              "And than this part of its largest stored average, by the rounding of stored snapshots: sum |c_j| u_j.")
      .def_ro("least", &Plan::least, "And than this, where stored averages are subnormal: of float16 snapshots.")
      .def_ro("size", &Plan::size, "sum |c_j|.")
      .def_prop_ro(
          "left_out", [](const Plan& plan) { return list_of(plan.left_out, to_text); },
          "Snapshots of other runs, and of futures that were given up.")
      .def("__str__", [](const Plan& plan) { return nb::borrow<nb::str>(to_text(posthoc::describe(plan))); })
      .def("__repr__", [](const Plan& plan) {
        return "PosthocPlan(" + plan.target.key() + " at step " + std::to_string(plan.step) + ")";
      });
  m.def(
      "posthoc_plan",
      [](const std::filesystem::path& directory, const Schedule& target, std::optional<int64_t> step, bool continuous) {
        return posthoc::plan(
            directory, {target, step, continuous ? posthoc::Formula::kContinuous : posthoc::Formula::kExact, signals});
      },
      "directory"_a, "target"_a, "step"_a = nb::none(), "continuous"_a = false,
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "is_past",
      [](const std::string& record, const std::string& of, int64_t step) {
        return posthoc::same_past(posthoc::record_from_json(record),
                                  posthoc::until(posthoc::record_from_json(of), step));
      },
      "record"_a, "of"_a, "step"_a,
      "Whether a snapshot of that step, with that record, is of the past of a run with the other.");
  nb::class_<SweepPoint>(m, "SweepPoint", "The error to expect of power(sigma_rel).")
      .def_ro("sigma_rel", &SweepPoint::sigma_rel)
      .def_ro("residual", &SweepPoint::residual,
              "Distance of the profiles, made from asked for, over the norm of what was asked for.")
      .def_ro("rounding", &SweepPoint::rounding, "By the rounding of stored snapshots, at most.");
  nb::class_<Sweep>(m, "Sweep", "The error to expect over sigma_rel.")
      .def_ro("step", &Sweep::step)
      .def_ro("snapshots", &Sweep::snapshots)
      .def_ro("tracked", &Sweep::tracked, "sigma_rel of the snapshots' own averages.")
      .def_ro("points", &Sweep::points);
  m.def(
      "posthoc_sweep",
      [](const std::filesystem::path& directory, std::optional<int64_t> step, std::vector<double> sigma_rels) {
        return posthoc::sweep(directory, step, std::move(sigma_rels), signals);
      },
      "directory"_a, "step"_a = nb::none(), "sigma_rels"_a = std::vector<double>{},
      nb::call_guard<nb::gil_scoped_release>());
  m.def("posthoc_check_output", &posthoc::check_output, "directory"_a, "out"_a,
        "Raises where a snapshot's files would be replaced.");
  m.def("posthoc_synthesize", &synthesize, "group"_a, "plan"_a, "path"_a, "dtype"_a, "max_shard_size"_a, "timeout"_a,
        "progress"_a.none(), "Collective: every rank gives the same plan.");
}

}  // namespace shardow::python
