// A CUDA driver without a device: libcuda.so.1 of the tests, which the engine opens as it opens NVIDIA's. Each stream
// is a queue of operations (copies, kernels, waits) that are carried out on the host, at once or later:
//
//   at once     each at its call; for tests of the order of calls, which read the log
//   by a seed   some time between its call and a host's wait for it, in pieces, streams in any order that CUDA allows:
//   everything is drawn
//               from the seed, at calls of the driver and where the host waits. With a Simulation the host's
//               threads take turns by a seed too, which replays all there was.
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
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace shardow::fake {

/// Variables of the environment say what the fake driver and the fake NVRTC are.
inline int number_from(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

/// Gives one value, as most functions do.
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
  bool log = true;  ///< takes memory, which tests in Python measure
};

/// Forgets everything: no contexts, no memory, no streams, an empty log. Nothing may be under way in other threads.
void reset(const Options& options);

std::vector<Call> calls_of(const std::string& what);  ///< since reset(), or since the log was cleared

// Work that a stream of the test does, an optimizer's for example: on the host, in stream order.
void enqueue(int device, void* stream, std::function<void()> work);
void follow(int device, void* stream, void* behind);  ///< what it does from here on comes after what that has to do

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

/// CUresult, as far as it is given.
enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidHandle = 400,
  kNotFound = 500,
  kIllegalAddress = 700,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnmatched = 903,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907
};

/// The work of a graph, one after the other.
using Graph = std::vector<Work>;

enum CaptureMode { kGlobal, kThreadLocal, kRelaxed };

struct Capture {
  Graph graph;
  void* origin;  ///< the stream that it began with
  CaptureMode mode;
  std::thread::id thread;
  bool invalid = false;
};

struct Event {
  Mark mark;  ///< of the last record
  int device = 0;
  std::shared_ptr<Capture> captured;  ///< the record is in this capture
};

struct Module {
  std::string image;
  int device;
};

struct Kernel {
  std::string name;
  const Twin* twin;
  int device;
};

/// State that reset() begins anew.
struct Session {
  Options options = {};
  std::vector<Call> log = {};
  std::set<int> contexts = {};
  std::map<std::pair<int, int>, void*> users_streams = {};
  int until_allocation_fails = -1;
  int num_copies = 0, failing_from = 0, failing_to = 0;  ///< copies from one number to another one fail
  bool drops_waits = false;                              ///< cuStreamWaitEvent does nothing, to show that it is missed
  int64_t copied_to_host = 0, copied_to_device = 0;
};

int current_device();  // of this thread; -1: it has no context

/// All of it is guarded by streams.mutex().
struct World : Session {
  std::set<const Event*> events;
  std::list<Module> modules;  ///< until the process ends, as kernels: nothing unloads them
  std::list<Kernel> kernels;
  Memory memory;
  Streams streams;

  void note(const char* what, void* stream = nullptr) {
    if (options.log) log.push_back({what, current_device(), stream});
  }
};

World& world();  // which tests look at where nothing is under way
std::unique_lock<std::mutex> locked();

Work on_device(Work work);  ///< work that reaches the device's memory

inline bool broken() {
  return world().streams.broken();
}

#pragma GCC visibility pop

}  // namespace shardow::fake
