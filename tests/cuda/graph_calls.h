// Functions of CUDA's driver that tests use and the engine does not, captures and graphs; what calls are refused with.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "kernels/cuda_driver.h"
#include "shardow/error.h"

namespace shardow::kernels::testing {

/// As cuda::Driver has the engine's.
struct GraphCalls {
  cuda::Library library = cuda::driver().library;

  cuda::Call<void*, int> begin_capture{library, "cuStreamBeginCapture_v2"};
  cuda::Call<void*, void**> end_capture{library, "cuStreamEndCapture"};
  cuda::Call<void**, void*, unsigned long long> instantiate{library, "cuGraphInstantiateWithFlags"};
  cuda::Call<void*, void*> launch{library, "cuGraphLaunch"};
  cuda::Call<void*> destroy{library, "cuGraphDestroy"};
  cuda::Call<void*> destroy_replay{library, "cuGraphExecDestroy"};
};

inline const GraphCalls& graph_calls() {
  static const GraphCalls calls;
  return calls;
}

enum CaptureMode { kGlobal, kThreadLocal, kRelaxed };

/// A user's current device, for calls of the driver.
class Current {
 public:
  explicit Current(int device) { cuda::driver().push_context(cuda::used_device(device).context); }
  ~Current() {
    void* context = nullptr;
    static_cast<void>(cuda::driver().pop_context.status(&context));
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

/// "" where it goes through.
inline std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

using StreamsByDevice = std::map<int, void*>;

/// The graphs of what fn() gave these streams, as torch captures them.
class Recording {
 public:
  Recording(const StreamsByDevice& streams, int mode, const std::function<void()>& fn) {
    for (const auto& [device, stream] : streams) {
      const Current current(device);
      graph_calls().begin_capture(stream, mode);
    }
    fn();
    for (const auto& [device, stream] : streams) {
      const Current current(device);
      void* graph = nullptr;
      if (const int code = graph_calls().end_capture.status(stream, &graph)) status = code;
      if (graph == nullptr) continue;
      graph_calls().instantiate(&replays_[device], graph, 0);
      graph_calls().destroy(graph);
    }
  }
  ~Recording() {
    for (const auto& [device, replay] : replays_) static_cast<void>(graph_calls().destroy_replay.status(replay));
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  /// Not 0: the driver's first refusal
  int launch(const StreamsByDevice& streams) const {
    for (const auto& [device, replay] : replays_) {
      const Current current(device);
      if (const int code = graph_calls().launch.status(replay, streams.at(device))) return code;
    }
    return 0;
  }

  int status = 0;  ///< not 0: a capture was lost, and how the driver calls that

 private:
  std::map<int, void*> replays_;  // by device, of captures that were not lost
};

}  // namespace shardow::kernels::testing
