// Merges of checkpoints, and their coefficients.
#include "shardow/merge.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <utility>

#include "callbacks.h"
#include "tensor/dtype.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

using Strings = std::map<std::string, std::string>;

/// What Python reads, one whole tensor at a time: whole(name) gives one that lies in host memory, packed.
class Whole final : public MergeSource {
 public:
  Whole(const std::map<std::string, std::pair<std::string, Shape>>& tensors, nb::callable whole) : whole_(std::move(whole)) {
    for (const auto& [name, one] : tensors) tensors_.emplace(name, std::pair(dtype_from_name(one.first), one.second));
  }

  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) names.push_back(name);
    return names;
  }

  std::pair<DType, Shape> tensor(std::string_view name) const override { return tensors_.find(name)->second; }

  bool one_at_a_time() const override { return true; }

  nb::dict described() const {
    nb::dict tensors;
    for (const auto& [name, one] : tensors_)
      tensors[nb::cast(name)] = nb::make_tuple(std::string(dtype_name(one.first)), nb::tuple(nb::cast(one.second)));
    return tensors;
  }

  void read(const TensorView& wanted) const override {
    const nb::gil_scoped_acquire gil;
    try {
      const nb::object tensor = whole_(wanted.name);
      const auto* const from = reinterpret_cast<const std::byte*>(nb::cast<uintptr_t>(tensor.attr("data_ptr")()));
      const nb::gil_scoped_release release;
      const int64_t size = dtype_bits(wanted.dtype) / 8;
      wanted.region.for_each_run([&](const Run& run) {
        std::memcpy(static_cast<std::byte*>(wanted.data) + run.local_begin * size, from + run.global_begin * size,
                    static_cast<size_t>(run.length * size));
      });
    } catch (const nb::python_error& raised) {
      throw_if_ours(raised);
      throw;
    }
  }

 private:
  std::map<std::string, std::pair<DType, Shape>, std::less<>> tensors_;
  nb::callable whole_;
};

using Tensors = std::variant<Checkpoint, std::shared_ptr<Whole>>;

MergeInput input_of(std::string name, const Tensors& tensors, double coefficient, std::optional<int64_t> step) {
  MergeInput input{std::move(name), std::shared_ptr<const MergeSource>(), coefficient, step};
  if (const auto* const opened = std::get_if<Checkpoint>(&tensors)) {
    input.tensors = *opened;
  } else {
    input.tensors = std::shared_ptr<const MergeSource>(std::get<1>(tensors));
  }
  return input;
}

nb::dict as_dict(const MergeReport& report) {
  nb::dict result;
  nb::list inputs, files;
  for (const auto& [name, step, coefficient] : report.inputs) {
    nb::dict one;
    one["name"] = name;
    one["step"] = step;
    one["coefficient"] = coefficient;
    inputs.append(one);
  }
  for (const auto& file : report.files) files.append(nb::str(nb::cast(file)));
  result["inputs"] = inputs;
  result["sum"] = report.sum;
  result["averaged"] = report.averaged;
  result["taken"] = report.taken;
  result["files"] = files;
  result["bytes_read"] = report.bytes_read;
  result["bytes_written"] = report.bytes_written;
  result["seconds"] = report.seconds;
  return result;
}

nb::dict merge_python(Group& group, const std::vector<MergeInput>& inputs, const std::filesystem::path& path,
                      const std::optional<std::string>& dtype, int64_t max_shard_size, const Strings& metadata, const std::string& formula,
                      bool verify, double timeout, const nb::object& progress) {
  Callbacks callbacks;
  MergeOptions options;
  if (dtype) options.dtype = dtype_from_name(*dtype);
  options.max_shard_size = max_shard_size;
  options.metadata = metadata;
  options.formula = formula;
  options.verify = verify;
  options.timeout = milliseconds(timeout);
  options.progress = callbacks.progress(progress);
  MergeReport report;
  callbacks.run([&] { report = merge(group, inputs, path, options); });
  return as_dict(report);
}

nb::dict load_merged_python(Group& group, const std::vector<TensorView>& tensors, const std::vector<MergeInput>& inputs, bool strict,
                            bool verify, bool check_only, double timeout, const nb::object& progress) {
  Callbacks callbacks;
  LoadOptions options;
  options.strict = strict;
  options.verify = verify;
  options.check_only = check_only;
  options.timeout = milliseconds(timeout);
  options.progress = callbacks.progress(progress);
  LoadReport report;
  callbacks.run([&] { report = load_merged(group, tensors, inputs, options); });
  nb::dict result;
  result["missing"] = report.missing;
  result["unexpected"] = report.unexpected;
  result["metadata"] = report.metadata;
  result["bytes_read"] = report.bytes_read;
  result["seconds"] = report.seconds;
  return result;
}

DecayCurve curve_named(const std::string& name) {
  if (const auto found = find_decay_curve(name)) return *found;
  throw Error(Code::kInvalidArgument, "curve '" + name + "': it must be linear, cosine, inv-sqrt or 1-sqrt");
}

}  // namespace

void bind_merge(nb::module_& m) {
  m.attr("MERGE_KEY") = kMergeKey;
  nb::class_<Coefficients>(m, "Coefficients", "Of a merge's inputs, in their order.")
      .def_ro("values", &Coefficients::values)
      .def_ro("formula", &Coefficients::formula)
      .def_ro("index_error", &Coefficients::index_error)
      .def_static("uniform", &uniform_coefficients, "inputs"_a)
      .def_static("given", &given_coefficients, "weights"_a, "normalize"_a = false)
      .def_static("ema", nb::overload_cast<size_t, double>(&ema_coefficients), "inputs"_a, "decay"_a)
      .def_static(
          "ema_per_step", [](const std::vector<int64_t>& steps, double decay) { return ema_coefficients(steps, decay); }, "steps"_a,
          "decay"_a)
      .def_static("lawa", &lawa_coefficients, "inputs"_a, "last"_a)
      .def_static(
          "curve", [](const std::string& name, const std::vector<int64_t>& steps) { return decay_coefficients(curve_named(name), steps); },
          "name"_a, "steps"_a);
  nb::class_<Whole>(m, "WholeTensors", "A merge's input that Python reads: whole(name) -> packed tensor on the CPU.")
      .def(nb::init<const std::map<std::string, std::pair<std::string, Shape>>&, nb::callable>(), "tensors"_a, "whole"_a)
      .def_prop_ro("tensors", &Whole::described, "{name: (dtype, shape)}");
  nb::class_<MergeInput>(m, "MergeInput", "One of the checkpoints that are merged.")
      .def(
          "__init__",
          [](MergeInput* self, std::string name, const Tensors& tensors, double coefficient, std::optional<int64_t> step) {
            new (self) MergeInput(input_of(std::move(name), tensors, coefficient, step));
          },
          "name"_a, "tensors"_a, "coefficient"_a = 0.0, "step"_a = nb::none())
      .def_ro("name", &MergeInput::name)
      .def_ro("step", &MergeInput::step)
      .def_rw("coefficient", &MergeInput::coefficient);
  m.def("step_of", &step_of, "path"_a, "metadata"_a = Strings(), "Of a checkpoint, by its metadata or its path; None: not to be known.");
  m.def(
      "sorted_by_step",
      [](std::vector<MergeInput> inputs) {
        sort_by_step(inputs);
        return inputs;
      },
      "inputs"_a, "Ascending where all have steps, else as they are.");
  m.def(
      "steps_of", [](const std::vector<MergeInput>& inputs) { return steps_of(inputs); }, "inputs"_a);
  m.def("merge", &merge_python, "group"_a, "inputs"_a, "path"_a, "dtype"_a = nb::none(), "max_shard_size"_a = 0, "metadata"_a = Strings(),
        "formula"_a = "", "verify"_a = true, "timeout"_a = 600.0, "progress"_a = nb::none(), "Collective; see include/shardow/merge.h.");
  m.def("load_merged", &load_merged_python, "group"_a, "tensors"_a, "inputs"_a, "strict"_a = true, "verify"_a = true,
        "check_only"_a = false, "timeout"_a = 600.0, "progress"_a = nb::none(), "Collective; see include/shardow/merge.h.");
}

}  // namespace shardow::python
