// Functions of CUDA's driver that tests use and the engine does not, captures and graphs; what calls are refused with.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/cuda_driver.h"
#include "shardow/error.h"

namespace shardow::kernels::testing {

/// As cuda::Driver has the engine's.
struct GraphCalls {
  cuda::Library library = cuda::driver().library;

  cuda::Call<void*, int> begin_capture{library, "cuStreamBeginCapture_v2"};
  cuda::Call<void*, void**> end_capture{library, "cuStreamEndCapture"};
  cuda::Call<void*, void**, size_t*> nodes{library, "cuGraphGetNodes"};
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
      Graph& made = graphs.emplace_back(Graph{device, nullptr, nullptr});
      if (const int code = graph_calls().end_capture.status(stream, &made.graph)) status = code;
      if (made.graph != nullptr) graph_calls().instantiate(&made.replay, made.graph, 0);
    }
  }
  ~Recording() {
    for (const Graph& made : graphs) {
      if (made.graph == nullptr) continue;
      static_cast<void>(graph_calls().destroy.status(made.graph));
      static_cast<void>(graph_calls().destroy_replay.status(made.replay));
    }
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  /// Not 0: the driver's first refusal
  int launch(const StreamsByDevice& streams) const {
    for (const Graph& made : graphs) {
      const Current current(made.device);
      if (made.graph == nullptr) continue;
      if (const int code = graph_calls().launch.status(made.replay, streams.at(made.device))) return code;
    }
    return 0;
  }

  struct Graph {
    int device;
    void *graph, *replay;  ///< null where the capture was lost
  };
  std::vector<Graph> graphs;
  int status = 0;  ///< not 0: a capture was lost, and how the driver calls that
};

}  // namespace shardow::kernels::testing
