#include "core.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace shardow::python {

void bind_engine(nanobind::module_& m) {
  m.doc() = "The engine of shardow. Use the package `shardow`; what is here may change.";
  nanobind::set_leak_warnings(false);  // at interpreter exit a user's EMA may outlive the module; nothing is lost by it
  m.def(
      "fail_at_exit",
      [] {
        ::on_exit(
            [](int status, void*) {
              std::fflush(nullptr);
              ::_exit(status == 0 ? EXIT_FAILURE : status);
            },
            nullptr);
      },
      "When everything of Python has ended, the process does so with an exit status that is not 0.");
  bind_errors(m);
  bind_region(m);
  bind_group(m);
  bind_schedule(m);
  bind_posthoc(m);
  bind_average(m);
  bind_watch(m);
  bind_file(m);
  bind_ema(m);
  bind_merge(m);
}

}  // namespace shardow::python
