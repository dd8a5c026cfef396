// What the files of the fake runtime share.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "fake_runtime.h"
#include "memory.h"
#include "streams.h"

struct CUevent_st {
  shardow::fake::MarkPtr mark;  ///< of the last record; null: none
  int device = 0;
  CUgraph_st* captured = nullptr;  ///< the record is in this capture
};

struct CUgraph_st {
  std::vector<shardow::fake::Work> nodes;  ///< in the order of their stream
};

namespace shardow::fake {

/// All of it is guarded by streams.mutex().
struct World {
  Options options;
  std::vector<Call> log;
  std::set<int> contexts;
  int until_allocation_fails = -1, until_copy_fails = -1, times = 0;
  bool drops_waits = false;
  Copied copied;
  std::map<void*, std::shared_ptr<CUgraph_st>>
      captures;  ///< by stream; of streams that are captured together they are the same
  Memory memory;
  Streams streams;

  /// As CUDA 12 and later: whatever is asked of the runtime makes the current device's context.
  void note(const char* what, void* stream = nullptr, const void* subject = nullptr);
};

World& world();
int& current_device();
cudaError_t failed(cudaError_t error);  ///< the last one of this thread
std::unique_lock<std::mutex> called();  ///< at each call: the device goes on, and others have their turns
cudaError_t state();                    ///< not cudaSuccess where the device has failed for good

/// Work that reaches the device's memory.
Work on_device(Work work);
/// Into the stream, or into the graph that it is captured into; the mark is null there.
MarkPtr enqueue(void* stream, Work work);
bool capturing(void* stream);
bool capturing_any();

}  // namespace shardow::fake
