// CUDA streams and graphs. The engine follows the stream that it is told, on every view: casts and swaps read it from
// there, tables keep their own, and the first use of a stream waits for the last one on the device.
#include <algorithm>

#include "average/impl.h"
#include "base/errors.h"

namespace shardow {
namespace {

void follow(std::vector<TensorView>& views, int index, void* stream) {
  for (TensorView& view : views) {
    if (view.device.kind == Device::Kind::kCuda && view.device.index == index) view.device.stream = stream;
  }
}

}  // namespace

void Average::Impl::set_stream(int index, void* stream) {
  for (const auto& backend : bound.backends) backend->set_stream(index, stream);
  for (const auto& offload : bound.offloads) offload->set_stream(index, stream);
  follow(undivided, index, stream);
  follow(parts, index, stream);
  for (std::vector<TensorView>& average : averages) follow(average, index, stream);
  if (!swap) return;
  follow(swap->whole, index, stream);
  follow(swap->weights, index, stream);
}

/// Of views that are bound anew: one stream for each device.
void Average::Impl::follow_streams(std::span<const TensorView> views) {
  for (size_t i = 0; i < views.size(); ++i) {
    const Device& is = views[i].device;
    if (is.kind == Device::Kind::kCuda && is.stream != whole()[i].device.stream) set_stream(is.index, is.stream);
  }
}

bool Average::Impl::capturing() const {
  const auto captures = [](const auto& one) { return one->capturing(); };
  return std::any_of(bound.backends.begin(), bound.backends.end(), captures) ||
         std::any_of(bound.offloads.begin(), bound.offloads.end(), captures);
}

void Average::Impl::capture() {
  if (!bound.offloads.empty()) refuse_graph("update() while its stream is captured");
  kernels::Step step{};  // its numbers come with prepare_replay()
  step.num_averages = static_cast<int32_t>(options.schedules.size());
  for (const auto& backend : bound.backends) {
    if (backend->capturing()) backend->capture(step);
  }
}

void Average::Impl::refuse_graph(const char* what) const {
  base::fail(Code::kUnsupported,
             "{}: the averages are on the host, whose threads do what no graph repeats; capture the step without it, "
             "and call update() after "
             "each replay",
             what);
}

}  // namespace shardow
