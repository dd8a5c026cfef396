// A CUDA runtime without a device, in place of NVIDIA's: it carries out copies on the host at once, runs no kernel, and keeps a log of who
// asked for what, on which device and stream. Tests of the order of calls read the log.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace shardow::fake {

struct Call {
  std::string what;               ///< "malloc", "free", "copy", "launch", "record", "stream waits", "host waits", ...
  int device = 0;                 ///< current in the calling thread
  void* stream = nullptr;         ///< where there is one
  const void* subject = nullptr;  ///< event or memory
  kernels::Step step = {};        ///< of a launch of an update
  bool by_pointer = false;        ///< of a launch of an update: the step is in device memory
};

/// Forgets everything: `num_devices` devices, no contexts, no memory, an empty log.
void reset(int num_devices, std::optional<uint64_t> seed = std::nullopt);

void run(int device, void* stream);  ///< does what the stream has to do by now, and what that waits for
void synchronize();                  ///< does all that there is
size_t pending();                    ///< operations under way

struct Copied {
  int64_t to_host = 0, to_device = 0;
};
Copied copied();                        ///< bytes since reset()
void fail_copy(int number, int times);  ///< the number-th copy from now fails (0: the next) and times - 1 after it; times < 0: all

std::vector<Call> calls();  ///< since reset() or clear()
std::vector<Call> calls_of(const std::string& what);
void clear();  ///< the log alone

std::vector<int> contexts();       ///< devices that have one
size_t allocated();                ///< bytes on devices and in pinned memory, not freed
void fail_allocation(int number);  ///< the number-th from now has no memory left; 0: the next
void capture(void* stream, bool begins);

}  // namespace shardow::fake
