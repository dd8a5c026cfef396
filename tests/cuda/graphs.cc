// Captures and replays. A graph is what its streams were asked for, one after the other.
#include "world.h"

using namespace shardow::fake;

struct CUgraphExec_st {
  CUgraph_st graph;
};

extern "C" {

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::lock_guard lock(world().streams.mutex());
  *status = capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const auto lock = called();
  if (stream == nullptr || capturing(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  world().captures[stream] = std::make_shared<CUgraph_st>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const auto lock = called();
  const auto found = world().captures.find(stream);
  if (found == world().captures.end()) return failed(cudaErrorInvalidValue);
  const std::shared_ptr<CUgraph_st> captured = found->second;
  *graph = new CUgraph_st{*captured};
  std::erase_if(world().captures, [&](const auto& one) { return one.second == captured; });
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* replay, cudaGraph_t graph, unsigned long long) {
  *replay = new CUgraphExec_st{*graph};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t stream) {
  const auto lock = called();
  world().note("replay", stream);
  if (state() != cudaSuccess) return cudaErrorIllegalAddress;
  for (const Work& node : replay->graph.nodes) enqueue(stream, node);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t replay) {
  delete replay;
  return cudaSuccess;
}

}  // extern "C"
