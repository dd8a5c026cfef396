// A CUDA driver without a device: libcuda.so.1 of the tests, which the engine opens as it opens NVIDIA's. Each stream
// is a queue of operations (copies, kernels, waits) that are carried out on the host, at once or later:
//
//   at once     each at its call; for tests of the order of calls, which read the log
//   by a seed   some time between its call and a host's wait for it, in pieces, streams in any order that CUDA allows:
//   everything is drawn
//               from the seed, at calls of the driver and where the host waits. With DrawnTurns the host's threads
//               take turns by it too, and a seed replays all there was.
//   by threads  each stream has a thread; for the thread sanitizer
//
// Memory of the device is the host's; any address may stand for one. With Options::guard what cuMemAlloc gave is out of
// the host's reach but while an operation works on it. A copy from or to host memory that is not pinned returns when
// that memory is done with, as on a device.
//
// What CUDA refuses is refused: calls without a context (which abort), streams and events that are gone or another
// device's, what a capture forbids by its mode and the thread's (and the capture is lost), graphs whose memory was
// freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace shardow::fake {

/// Variables of the environment say what the fake driver and the fake NVRTC are.
inline int number_from(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

/// What most functions do that give something.
template <class T>
int give(T* to, std::type_identity_t<T> value) {
  *to = value;
  return 0;
}

#pragma GCC visibility push(default)

struct Call {
  std::string what;        ///< "malloc", "free", "copy", "launch", "record", "stream waits", "host waits", ...
  int device = 0;          ///< current in the calling thread
  void* stream = nullptr;  ///< where there is one
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

std::vector<Call> calls_of(const std::string& what);  ///< since reset(), or since the log was cleared

// Work that a stream of the test does, an optimizer's for example: on the host, in stream order.
void enqueue(int device, void* stream, std::function<void()> work);
void follow(int device, void* stream, void* behind);  ///< what it does from here on comes after what that has to do
void fetch(void* to, const void* from, size_t bytes, int device, void* stream);  ///< to the host; no copy that fails

bool inside();  ///< this thread is in a call of the driver

void synchronize();  ///< does all that there is

// By these names Python has them.
void reset(int num_devices, int64_t seed) asm("fake_reset");      // seed < 0: everything happens at once
void* stream(int device, int number) asm("fake_stream");          // one that a user made; the same until reset()
void run(void* stream, int device) asm("fake_run");               // does what it has to do, and what that waits for
size_t allocated() asm("fake_allocated");                         // bytes on devices and pinned, not freed
int64_t copied_to_host() asm("fake_copied_to_host");              // bytes, since reset()
void fail_allocation(int number) asm("fake_fail_allocation");     // the number-th from now; 0: the next; < 0: none
void fail_copy(int number, int times = 1) asm("fake_fail_copy");  // and times - 1 after it; times < 0: all

/// For DrawnTurns: called at each call of the driver and again and again where the host waits, with nothing locked.
extern std::function<void()> between;

#pragma GCC visibility pop

}  // namespace shardow::fake
