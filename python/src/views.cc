// Views of what a rank holds, by the thousand, without an object of Python's for each.
#include "views.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core.h"
#include "kernels/cuda.h"
#include "shardow/tensor_view.h"
#include "tensor/dtype.h"
#include "torch_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

/// None where it is no text that UTF-8 can say.
std::optional<std::string> text_of(nb::handle name) {
  Py_ssize_t length = 0;
  const char* const text = PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8AndSize(name.ptr(), &length) : nullptr;
  if (text != nullptr) return std::string(text, static_cast<size_t>(length));
  PyErr_Clear();  // before anything else is asked of Python
  return std::nullopt;
}

/// Makes views of tensors.
class ViewMaker {
 public:
  /// `dtypes`: the engine's names of torch's; `stream_of(index)`: where a CUDA device's work is enqueued.
  ViewMaker(nb::type_object tensor, nb::type_object parameter, nb::dict dtypes, std::function<uintptr_t(int)> stream_of)
      : memory_(tensor, parameter), dtypes_(std::move(dtypes)), stream_of_(std::move(stream_of)) {
    for (auto [torchs, name] : dtypes_) known_.emplace(torchs.ptr(), dtype_from_name(nb::cast<std::string>(name)));
  }

  /// None where one of them is not plain contiguous memory that the engine reaches, under a name that is text. CUDA is
  /// asked nothing before the first tensor on a device: its answer takes a second, and forked children can't use it.
  std::optional<Views> of(const nb::list& names, const nb::list& flats, const nb::list& regions) const {
    std::map<int, void*> streams;
    Views made;
    made.all.reserve(names.size());
    for (size_t i = 0; i < names.size(); ++i) {
      const nb::object name = names[i], flat = flats[i], region = regions[i];
      nb::dlpack::dltensor found;
      if (!memory_.describe(flat, found) || !in_order(found)) return std::nullopt;
      Device device;
      if (found.device.device_type == nb::device::cuda::value && kernels::cuda::available()) {
        const auto [at, is_new] = streams.try_emplace(found.device.device_id);
        if (is_new) at->second = reinterpret_cast<void*>(stream_of_(found.device.device_id));
        device = {Device::Kind::kCuda, found.device.device_id, at->second};
      } else if (found.device.device_type != nb::device::cpu::value) {
        return std::nullopt;
      }
      std::optional<std::string> text = text_of(name);
      if (!text) return std::nullopt;
      const auto dtype = known_.find(nb::object(flat.attr(dtype_)).ptr());
      if (dtype == known_.end() || !nb::isinstance<Region>(region)) return std::nullopt;
      made.all.push_back({std::move(*text), dtype->second, nb::cast<const Region&>(region),
                          static_cast<std::byte*>(found.data) + found.byte_offset, device});
    }
    return made;
  }

 private:
  TorchMemory memory_;
  nb::dict dtypes_;  // so that they live
  std::function<uintptr_t(int)> stream_of_;
  std::unordered_map<PyObject*, DType> known_;
  nb::str dtype_{"dtype"};
};

}  // namespace

void bind_views(nb::module_& m) {
  nb::class_<Views>(m, "Views", "TensorViews by the thousand.")
      .def(
          "__init__", [](Views* self, std::vector<TensorView> all) { new (self) Views{std::move(all)}; }, "all"_a)
      .def("__len__", [](const Views& self) { return self.all.size(); });
  nb::class_<ViewMaker>(m, "ViewMaker", "Makes views of tensors in plain torch memory.")
      .def(nb::init<nb::type_object, nb::type_object, nb::dict, std::function<uintptr_t(int)>>(), "tensor"_a,
           "parameter"_a, "dtypes"_a, "stream_of"_a)
      .def("of", &ViewMaker::of, "names"_a, "flats"_a, "regions"_a,
           nb::sig("def of(self, names: list[str], flats: Sequence[object], regions: list[Region]) -> Views | None"),
           "None where one of them is something else, and each is to be looked at.");
}

}  // namespace shardow::python
