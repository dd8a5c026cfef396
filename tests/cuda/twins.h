// The kernels' twins on the host: the same sources, compiled over the emulation (twins.cc).
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace shardow::fake {

struct Twin {
  std::vector<size_t> sizes;  ///< of the kernel's parameters, in bytes
  /// What each thread does, with copies of the arguments.
  std::function<std::function<void()>(void** arguments)> bind;
};

void touch_shared_memory();  ///< of this thread, so that it is there

/// By the name that the engine asks NVRTC for, "update_kernel<float, BF16>", or by the mangled one; null: none.
const Twin* twin_of(const std::string& name);

/// "update_kernel<float, BF16>" of "_ZN7shardow7kernels...", which NVRTC and g++ mangle alike.
std::string plain_name(const std::string& mangled);

}  // namespace shardow::fake

#pragma GCC visibility pop
