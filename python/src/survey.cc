// Survey: what is usual of tensors by the thousand is found out without a step of Python's for each, which then looks at the others alone.
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "core.h"
#include "torch_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

class Survey {
 public:
  Survey(nb::type_object tensor, nb::type_object parameter) : memory_(tensor, parameter) {}

  // One byte for each: 1 where it is torch's own kind of tensor, dense, its elements in order in memory of the host or of a CUDA device.
  nb::bytes plain(const nb::list& tensors) const {
    std::string flags;
    nb::dlpack::dltensor found;
    for (nb::handle one : tensors) flags.push_back(is_plain(one, found) ? '\1' : '\0');
    return nb::bytes(flags.data(), flags.size());
  }

  // All are plain, and no two have bytes in common. Empty ones lie nowhere.
  bool apart(const nb::list& tensors) const {
    struct Range {
      int32_t kind, index;
      uintptr_t begin, end;
    };
    std::vector<Range> ranges;
    ranges.reserve(tensors.size());
    nb::dlpack::dltensor found;
    for (nb::handle one : tensors) {
      if (!is_plain(one, found)) return false;
      uint64_t bits = uint64_t{found.dtype.bits} * found.dtype.lanes;
      for (int32_t i = 0; i < found.ndim; ++i) bits *= static_cast<uint64_t>(found.shape[i]);
      if (bits == 0) continue;
      const uintptr_t begin = reinterpret_cast<uintptr_t>(found.data) + found.byte_offset;
      ranges.push_back({found.device.device_type, found.device.device_id, begin, begin + (bits + 7) / 8});
    }
    const auto key = [](const Range& one) { return std::tuple(one.kind, one.index, one.begin); };
    std::sort(ranges.begin(), ranges.end(), [&](const Range& a, const Range& b) { return key(a) < key(b); });
    const auto meet = [](const Range& a, const Range& b) { return a.kind == b.kind && a.index == b.index && b.begin < a.end; };
    return std::adjacent_find(ranges.begin(), ranges.end(), meet) == ranges.end();
  }

 private:
  bool is_plain(nb::handle tensor, nb::dlpack::dltensor& found) const {
    return memory_.describe(tensor, found) && in_order(found) &&
           (found.device.device_type == nb::device::cpu::value || found.device.device_type == nb::device::cuda::value);
  }

  TorchMemory memory_;
};

}  // namespace

void bind_survey(nb::module_& m) {
  nb::class_<Survey>(m, "Survey", "Which of many tensors are as most are.")
      .def(nb::init<nb::type_object, nb::type_object>(), "tensor"_a, "parameter"_a)
      .def("plain", &Survey::plain, "tensors"_a, nb::sig("def plain(self, tensors: list[object]) -> bytes"),
           "One byte for each: 1 where it is a torch.Tensor or Parameter itself, dense, its elements in order in memory of the host or of "
           "a CUDA device. 0: it has to be looked at.")
      .def("apart", &Survey::apart, "tensors"_a, nb::sig("def apart(self, tensors: list[object]) -> bool"),
           "All are plain, and no two have bytes in common. False: they have to be looked at.");
}

}  // namespace shardow::python
