// A CUDA runtime without a device, in place of NVIDIA's. Each stream is a queue of operations (copies, kernels, waits)
// that are carried out on the host, at once or later:
//
//   at once     each at its call; for tests of the order of calls, which read the log
//   by a seed   some time between its call and a host's wait for it, in pieces, streams in any order that CUDA allows:
//   everything is drawn
//               from the seed, at calls of the runtime and where the host waits. With DrawnTurns the host's threads
//               take turns by it too, and a seed replays all there was.
//   by threads  each stream has a thread; for the thread sanitizer
//
// Memory of the device is the host's; any address may stand for one. With Options::guard what cudaMalloc gave is out of
// the host's reach but while an operation works on it. A copy from or to host memory that is not pinned returns when
// that memory is done with, as on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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

struct Options {
  int num_devices = 1;
  std::optional<uint64_t> seed = std::nullopt;
  bool threads = false;
  bool guard = false;
  bool log = true;
};

/// Forgets everything: no contexts, no memory, no streams, an empty log. Nothing may be under way in other threads.
void reset(const Options& options);
inline void reset(int num_devices) {
  reset(Options{.num_devices = num_devices});
}

std::vector<Call> calls();  ///< since reset() or clear()
std::vector<Call> calls_of(const std::string& what);
void clear();  ///< the log alone

std::vector<int> contexts();              ///< devices that have one
size_t allocated();                       ///< bytes on devices and in pinned memory, not freed
void capture(void* stream, bool begins);  ///< a capture whose graph nobody wants

/// Work that a stream of the test does, an optimizer's for example: on the host, in stream order.
void enqueue(int device, void* stream, std::function<void()> work);
void follow(int device, void* stream,
            void* behind);  ///< what the stream does from here on comes after what the other has to do
void fetch(void* to, const void* from, size_t bytes, int device,
           void* stream);            ///< to the host, in stream order; no copy that fails
void run(int device, void* stream);  ///< does what the stream has to do by now, and what that waits for
void synchronize();                  ///< does all that there is
size_t pending();                    ///< operations under way

struct Copied {
  int64_t to_host = 0, to_device = 0;
};
Copied copied();  ///< bytes, since reset()

void fail_allocation(int number);  ///< the number-th from now has no memory left; 0: the next; < 0: none
void fail_copy(int number,
               int times = 1);  ///< the number-th call of a copy from now is refused (0: the next), and times - 1 after
                                ///< it; times < 0: all
void break_after(int operations);  ///< when so many more are done, the device has failed for good, and every later call
                                   ///< says so; < 0: never

bool broken();
void drop_waits(bool dropped);  ///< cudaStreamWaitEvent does nothing, to show that it is missed

/// For DrawnTurns: called at each call of the runtime and again and again where the host waits, with nothing locked.
extern std::function<void()> between;

}  // namespace shardow::fake
