#include "base/huge_pages.h"
#include "core.h"

namespace nb = nanobind;

namespace shardow::python {

void bind_memory(nb::module_& m) {
  m.def(
      "prefer_huge_pages",
      [](uintptr_t address, size_t bytes) { base::prefer_huge_pages({reinterpret_cast<std::byte*>(address), bytes}); },
      nb::arg("address"), nb::arg("bytes"), "Asks for huge pages in memory that nobody has touched yet. A hint.");
}

}  // namespace shardow::python
