// The kernels of devices: compiled when they are first asked for, once a process and architecture, and loaded once a
// device. Never unloaded.
#pragma once

#include <string>
#include <vector>

namespace shardow::kernels::cuda {

/// By their names, as compile() takes them; functions of the driver's, in the same order. Needs a current context, and
/// may wait for what the device does. Throws what compile() throws.
const std::vector<void*>& load_kernels(const std::vector<std::string>& names, int index);

}  // namespace shardow::kernels::cuda
