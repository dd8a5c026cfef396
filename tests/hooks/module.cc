// The extension module with its hooks: build/release/hooks/_core, which is never installed.
#include "core.h"
#include "hooks.h"

NB_MODULE(_core, m) {
  shardow::python::bind_engine(m);
  shardow::hooks::bind(m);
}
