// The extension module over the fake device: _core as it is, its hooks, and _core.fake, which says what the device does
// and when.
#include <nanobind/stl/optional.h>

#include "core.h"
#include "fake_runtime.h"
#include "hooks.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace shardow;

namespace {

void* stream_of(uintptr_t handle) {
  return reinterpret_cast<void*>(handle);
}

}  // namespace

NB_MODULE(_core, m) {
  python::bind_engine(m);
  hooks::bind(m);
  nb::module_ f = m.def_submodule(
      "fake", "The device in place of CUDA's. Memory of any CPU tensor may stand for memory of the device.");
  f.def(
      "reset",
      [](int num_devices, std::optional<uint64_t> seed) {
        fake::reset({.num_devices = num_devices, .seed = seed, .log = false});
      },
      "num_devices"_a = 1, "seed"_a = nb::none(),
      "Forgets everything. Without a seed each operation is done at once; with one, some time between its call and a "
      "wait for it.");
  f.def(
      "run", [](uintptr_t stream, int device) { fake::run(device, stream_of(stream)); }, "stream"_a = 0, "device"_a = 0,
      "Does what the stream has to do by now, and what that waits for, and nothing else: so the next write to weights "
      "is in stream order.");
  f.def("synchronize", &fake::synchronize, "Does all that devices have to do.");
  f.def("pending", &fake::pending, "Operations that are under way.");
  f.def("fail_copy", &fake::fail_copy, "number"_a = 0, "times"_a = 1,
        "The copy of this number from now fails (0: the next), and times - 1 after it; times=-1: all.");
  f.def("fail_allocation", &fake::fail_allocation, "number"_a = 0,
        "The allocation of this number from now has no memory; 0: the next.");
  f.def("allocated", &fake::allocated, "Bytes of devices and of pinned memory that the engine has.");
  f.def(
      "copied_to_host", [] { return fake::copied().to_host; }, "Bytes since reset().");
  f.def(
      "copied_to_device", [] { return fake::copied().to_device; }, "Bytes since reset().");
}
