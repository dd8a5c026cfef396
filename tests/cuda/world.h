// State and errors of the fake driver.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fake.h"
#include "memory.h"
#include "streams.h"

namespace shardow::fake {

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
  kNotReady = 600,
  kIllegalAddress = 700,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnmatched = 903,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908
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

__attribute__((visibility("default"))) int current_device();  // of this thread; -1: it has no context

/// All of it is guarded by streams.mutex().
struct World : Session {
  std::set<const Event*> events;
  std::list<Graph> graphs;    ///< until they are destroyed
  std::list<Module> modules;  ///< until the process ends, as kernels: nothing unloads them
  std::list<Kernel> kernels;
  Memory memory;
  Streams streams;

  void note(const char* what, void* stream = nullptr) {
    if (options.log) log.push_back({what, current_device(), stream});
  }
};

__attribute__((visibility("default"))) World& world();  // which tests look at where nothing is under way
std::unique_lock<std::mutex> locked();

Work on_device(Work work);  ///< work that reaches the device's memory

inline bool broken() {
  return world().streams.broken();
}

}  // namespace shardow::fake
