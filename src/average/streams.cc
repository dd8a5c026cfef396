// CUDA streams and graphs. The engine follows the stream that it is told, on every view: casts and swaps read it from there, tables
// keep their own, and the first use of a stream waits for the last one on the device.
#include <algorithm>

#include "average/impl.h"

namespace shardow {
namespace {

void follow(std::vector<TensorView>& views, int index, void* stream) {
  for (TensorView& view : views) {
    if (view.device.kind == Device::Kind::kCuda && view.device.index == index) view.device.stream = stream;
  }
}

}  // namespace

void Average::Impl::set_stream(int index, void* stream) {
  for (const auto& backend : backends) backend->set_stream(index, stream);
  follow(whole, index, stream);
  follow(parts, index, stream);
  for (std::vector<TensorView>& average : averages) follow(average, index, stream);
}

/// Of views that are bound anew: one stream for each device.
void Average::Impl::follow_streams(std::span<const TensorView> views) {
  for (size_t i = 0; i < views.size(); ++i) {
    const Device& is = views[i].device;
    if (is.kind == Device::Kind::kCuda && is.stream != whole[i].device.stream) set_stream(is.index, is.stream);
  }
}

bool Average::Impl::capturing() const {
  return std::any_of(backends.begin(), backends.end(), [](const auto& backend) { return backend->capturing(); });
}

void Average::Impl::capture() {
  kernels::Step step{};  // its numbers come with prepare_replay()
  step.num_averages = static_cast<int32_t>(options.schedules.size());
  for (const auto& backend : backends) {
    if (backend->capturing()) backend->capture(step);
  }
}

}  // namespace shardow
