#include "core.h"

namespace shardow::python {

NB_MODULE(_core, m) {
  m.doc() = "The engine of shardow. Use the package `shardow`; what is here may change.";
  nanobind::set_leak_warnings(false);  // at interpreter exit a user's EMA may outlive the module; nothing is lost by it
  bind_errors(m);
  bind_region(m);
  bind_group(m);
  bind_schedule(m);
  bind_average(m);
  bind_watch(m);
  bind_file(m);
}

}  // namespace shardow::python
