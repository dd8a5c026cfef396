// Merges of checkpoints, and their coefficients.
#include "shardow/merge.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "callbacks.h"
#include "file_options.h"
#include "merge/rules.h"
#include "tensor/dtype.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

/// What Python reads, a tensor or a part of it at a time: part(name, element) gives (address, first element, the one
/// after the last) of packed host memory that has the element, until it is called again.
class InParts final : public MergeSource {
 public:
  InParts(nb::dict tensors, nb::callable part) : given_(std::move(tensors)), part_(std::move(part)) {
    for (const auto& [name, form] : nb::cast<std::map<std::string, std::pair<std::string, Shape>>>(given_))
      tensors_.emplace(name, std::pair(dtype_from_name(form.first), form.second));
  }

  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) names.push_back(name);
    return names;
  }

  std::pair<DType, Shape> tensor(std::string_view name) const override { return tensors_.find(name)->second; }

  bool one_at_a_time() const override { return true; }

  nb::dict given() const { return given_; }

  void read(const TensorView& wanted) const override {
    const int64_t size = dtype_bits(wanted.dtype) / 8;
    wanted.region.for_each_run([&](const Run& run) {
      for (int64_t done = 0; done < run.length;) {
        const int64_t element = run.global_begin + done;
        if (latest_.name != wanted.name || element < latest_.begin || element >= latest_.end) ask(wanted.name, element);
        const int64_t count = std::min(run.length - done, latest_.end - element);
        std::memcpy(static_cast<std::byte*>(wanted.data) + (run.local_begin + done) * size,
                    latest_.data + (element - latest_.begin) * size, static_cast<size_t>(count * size));
        done += count;
      }
    });
  }

 private:
  struct Latest {
    std::string name = {};
    const std::byte* data = nullptr;
    int64_t begin = 0, end = 0;  // elements
  };

  void ask(const std::string& name, int64_t element) const {
    const nb::gil_scoped_acquire gil;
    latest_ = {};
    try {
      const auto [address, begin, end] = nb::cast<std::tuple<uintptr_t, int64_t, int64_t>>(part_(name, element));
      if (element < begin || element >= end)
        throw Error(Code::kInternal, "'" + name + "': another part came than was asked for");
      latest_ = {name, reinterpret_cast<const std::byte*>(address), begin, end};
    } catch (const nb::python_error& raised) {
      throw_if_ours(raised);
      throw;
    }
  }

  std::map<std::string, std::pair<DType, Shape>, std::less<>> tensors_;
  nb::dict given_;
  nb::callable part_;
  mutable Latest latest_;  // one thread asks at a time
};

using Tensors = std::variant<Checkpoint, std::shared_ptr<InParts>>;

MergeInput input_of(const std::filesystem::path& name, const Tensors& tensors, double coefficient,
                    std::optional<int64_t> step) {
  const auto as_input = [&](const auto& source) { return MergeInput{name.string(), source, coefficient, step}; };
  return std::visit(as_input, tensors);
}

nb::dict as_dict(const MergeReport& report) {
  nb::dict result = written(report);
  result["inputs"] = list_of(report.inputs, [](const auto& input) {
    nb::dict described;
    described["name"] = decoded(input.name);
    described["step"] = input.step;
    described["coefficient"] = input.coefficient;
    return described;
  });
  result["sum"] = report.sum;
  result["newest"] = decoded(report.newest);
  result["averaged"] = report.averaged;
  result["taken"] = report.taken;
  result["bytes_read"] = report.bytes_read;
  return result;
}

nb::dict merge_python(Group& group, const std::vector<MergeInput>& inputs, const std::filesystem::path& path,
                      const std::optional<std::string>& dtype, int64_t max_shard_size, const Strings& metadata,
                      const std::string& formula, bool verify, int threads, double timeout,
                      const nb::object& progress) {
  Callbacks callbacks;
  auto options = writing<MergeOptions>(dtype, max_shard_size, metadata, timeout, callbacks.progress(progress));
  options.threads = threads;
  options.formula = formula;
  options.verify = verify;
  MergeReport report;
  callbacks.run([&] { report = merge(group, inputs, path, options); });
  return as_dict(report);
}

nb::dict load_merged_python(Group& group, const std::vector<TensorView>& tensors, const std::vector<MergeInput>& inputs,
                            bool strict, bool verify, bool check_only, double timeout, const nb::object& progress) {
  Callbacks callbacks;
  const LoadOptions options = reading(strict, verify, check_only, timeout, callbacks.progress(progress));
  LoadReport report;
  callbacks.run([&] { report = load_merged(group, tensors, inputs, options); });
  return dict_of(report);
}

MergeRule rule_of(const std::optional<std::vector<double>>& weights, bool normalize, std::optional<double> ema,
                  bool per_step, std::optional<size_t> lawa, const std::optional<std::string>& curve) {
  using Kind = MergeRule::Kind;
  if (weights) return {Kind::kWeights, *weights, normalize};
  if (ema) return {.kind = Kind::kEma, .decay = *ema, .per_step = per_step};
  if (lawa) return {.kind = Kind::kLawa, .last = *lawa};
  if (!curve) return {};
  if (const auto found = find_decay_curve(*curve)) return {.kind = Kind::kCurve, .curve = *found};
  throw Error(Code::kInvalidArgument, "curve '" + *curve + "': it must be linear, cosine, inv-sqrt or 1-sqrt");
}

}  // namespace

void bind_merge(nb::module_& m) {
  m.attr("MERGE_KEY") = kMergeKey;
  nb::class_<InParts>(
      m, "InParts",
      "A merge's input that Python reads: part(name, element) -> (address, first element, the one after the last).")
      .def(nb::init<nb::dict, nb::callable>(), "tensors"_a, "part"_a)
      .def_prop_ro("tensors", &InParts::given, "{name: (dtype, shape)}");
  nb::class_<MergeInput>(m, "MergeInput", "One of the checkpoints that are merged.")
      .def(nb::new_(&input_of), "name"_a, "tensors"_a, "coefficient"_a = 0.0, "step"_a = nb::none());
  m.def("step_of", &step_of, "path"_a, "metadata"_a = Strings(),
        "Of a checkpoint, by its metadata or its path; None: not to be known.");
  m.def(
      "weigh",
      [](std::vector<MergeInput> inputs, const std::optional<std::vector<double>>& weights, bool normalize,
         std::optional<double> ema, bool per_step, std::optional<size_t> lawa,
         const std::optional<std::string>& curve) {
        const Coefficients weighed = weigh(inputs, rule_of(weights, normalize, ema, per_step, lawa, curve));
        nb::str newest = decoded(inputs[newest_of(inputs)].name);
        return std::tuple(std::move(inputs), weighed.formula, weighed.index_error, std::move(newest));
      },
      "inputs"_a, "weights"_a.none(), "normalize"_a, "ema"_a.none(), "per_step"_a, "lawa"_a.none(), "curve"_a.none(),
      "(inputs with their coefficients, in the rule's order; the rule's formula; how far weighing by index would be "
      "off, "
      "or None; the name of the newest).");
  m.def("merge", &merge_python, "group"_a, "inputs"_a, "path"_a, "dtype"_a = nb::none(), "max_shard_size"_a = 0,
        "metadata"_a = Strings(), "formula"_a = "", "verify"_a = true, "threads"_a = 4, "timeout"_a = 600.0,
        "progress"_a = nb::none(), "Collective; see include/shardow/merge.h.");
  m.def("load_merged", &load_merged_python, "group"_a, "tensors"_a, "inputs"_a, "strict"_a = true, "verify"_a = true,
        "check_only"_a = false, "timeout"_a = 600.0, "progress"_a = nb::none(),
        "Collective; see include/shardow/merge.h.");
}

}  // namespace shardow::python
