// Overlapped updates: planned by the caller, done by a thread of the Average's own while the caller goes on. Nobody else touches averages
// until wait(), which every call that would do so begins with.
#include <algorithm>
#include <chrono>

#include "average/impl.h"

namespace shardow {
namespace {

using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point began) {
  return std::chrono::duration<double>(steady_clock::now() - began).count();
}

}  // namespace

void Average::Impl::begin_overlapped(const kernels::Step& step) {
  prepare_noise(step);  // may lack memory, which the caller hears at once
  under_way_ = UnderWay{step, {}, 0};
  worker_->begin([this] {  // one pointer: nothing allocates
    const auto began = steady_clock::now();
    under_way_->count = dispatch(under_way_->step);
    under_way_->seconds = seconds_since(began);
  });
}

void Average::Impl::wait() {
  if (!under_way_) return;
  const auto began = steady_clock::now();
  worker_->wait();
  const double waited = seconds_since(began);
  const UnderWay ended = *under_way_;
  under_way_.reset();
  seconds = ended.seconds;
  waited_seconds += waited;
  hidden_seconds += std::max(ended.seconds - waited, 0.0);
  unreported_ += ended.count.elements;
  met_non_finite(ended.count, ended.step.step);
}

}  // namespace shardow
