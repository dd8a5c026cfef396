// Functions of CUDA's driver that tests use and the engine does not: captures, graphs, questions to streams.
#pragma once

#include <dlfcn.h>

#include "kernels/cuda_driver.h"

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
  cuda::Call<void*> query_stream{library, "cuStreamQuery"};
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

}  // namespace shardow::kernels::testing
