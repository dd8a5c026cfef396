// The areas of the extension module; each file binds one, and holds no logic.
#pragma once

#include <nanobind/nanobind.h>

namespace shardow::python {

void bind_errors(nanobind::module_& m);
void bind_region(nanobind::module_& m);
void bind_group(nanobind::module_& m);
void bind_schedule(nanobind::module_& m);
void bind_average(nanobind::module_& m);
void bind_watch(nanobind::module_& m);
void bind_file(nanobind::module_& m);

}  // namespace shardow::python
