// What tests and benchmarks have of the engine beside the extension module that is shipped.
#pragma once

#include <nanobind/nanobind.h>

namespace shardow::hooks {

/// Makes the submodule `hooks` of `m`, which bind_engine() has filled.
void bind(nanobind::module_& m);

}  // namespace shardow::hooks
