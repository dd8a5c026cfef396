// NVRTC, CUDA's compiler as a library: the kernels are compiled where they run, for the device and the driver that are
// there.
#pragma once

#include <string>
#include <vector>

namespace shardow::kernels::cuda {

struct Compiled {
  std::string image;               ///< a cubin; PTX where NVRTC does not know the device yet
  std::vector<std::string> names;  ///< of the kernels in the image, in the order in which they were asked for
  std::string compiler;            ///< "NVRTC 12.9"
};

/// Kernels by their names in shardow::kernels::cuda with their template arguments, for a device. Throws kUnsupported,
/// saying what was looked for, where there is no NVRTC that both driver and device go with; kInternal with NVRTC's log
/// where it refuses the sources.
Compiled compile(const std::vector<std::string>& kernels, int index);

}  // namespace shardow::kernels::cuda
