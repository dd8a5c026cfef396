// Updates in the background: planned by the caller, done by a thread of the Average's own while the caller goes on.
// Nobody else touches averages until wait(), which every call that would do so begins with. options.overlap has all
// work done so; averages on the host of weights on a device always are.
//
// An update of the latter (offload.h), and what becomes of one that fails:
//   1. the device notes how far the weights' stream has come (begin(), on the caller's thread); the copies come after
//   that
//   2. copies begin, as many as the ring holds
//   3. what fits its ring is waited for. Until here nothing has changed: a failure ends the update, and the averages
//   are those of the last
//   4. block by block: wait for its copies, average it, begin the next copies. An exact way back would need a copy of
//   the averages, so a
//      failure leaves the update under way, and each later call takes it up with the block where it stopped. That is
//      right as long as the weights have not changed, so finish_reading(), which lets them change, throws as well
//   5. all copies have begun: part_done(). From here on finish_reading() has the device wait for the last one, and the
//   host goes on. A
//      failure of a copy under way is a failure of the device; blocks that it has torn stay so, and are refused until
//      reset()
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "average/impl.h"
#include "base/errors.h"
#include "base/turns.h"

namespace shardow {

using base::fail;
using base::seconds_since;
using std::chrono::steady_clock;

/// On the worker's thread; from where it stopped, where it did.
void Average::Impl::work() {
  UnderWay& now = *under_way_;
  const auto began = steady_clock::now();
  const bool by_runs = draws_by_runs(now.step);
  const auto fetch = [&](average::Offload& one) {
    one.fetch();
    if (std::all_of(bound.offloads.begin(), bound.offloads.end(), [](const auto& each) { return each->fetched(); }))
      worker_->part_done();
  };
  try {
    for (const auto& offload : bound.offloads) fetch(*offload);
    for (const auto& offload : bound.offloads) {
      if (offload->fits()) offload->arrive();
    }
    for (const auto& offload : bound.offloads) {
      while (!offload->done()) {
        add(now.count, offload->next(now.step, by_runs));
        now.changed = true;
        fetch(*offload);
      }
    }
    if (options.overlap) add(now.count, dispatch(now.step));
  } catch (...) {
    for (const auto& offload : bound.offloads) offload->stop();
    now.seconds += seconds_since(began);
    throw;
  }
  now.seconds += seconds_since(began);
}

void Average::Impl::wait() {
  if (torn) throw Error(*torn);
  if (!under_way_) return;
  const auto began = steady_clock::now();
  if (std::exchange(under_way_->stopped, false)) worker_->begin([this] { work(); });
  try {
    worker_->wait();
  } catch (const Error& cause) {
    under_way_->waited += seconds_since(began);
    stopped(cause);
  } catch (const std::exception& cause) {
    stopped(Error(Code::kInternal, cause.what()));
  }
  UnderWay ended = *under_way_;
  under_way_.reset();
  ended.waited += seconds_since(began);
  seconds = ended.seconds;
  waited_seconds += ended.waited;
  hidden_seconds += std::max(ended.seconds - ended.waited, 0.0);
  unreported_ += ended.count.elements;
  hold(ended.count, ended.step.step);
  refuse_non_finite(ended.count, ended.step.step);
}

/// The update under way has failed.
void Average::Impl::stopped(const Error& cause) {
  UnderWay& now = *under_way_;
  const int64_t step = now.step.step;
  if (!now.changed) {
    counters.updates = now.before.updates;
    counters.applied_step = now.before.applied_step;
    counters.applied_samples = now.before.applied_samples;
    waited_seconds += now.waited;
    under_way_.reset();
    fail(cause.code(),
         "the update of step {} was not made, since weights did not reach the host; the averages are those of step {}, "
         "and the next update "
         "makes up for it: {}",
         step, counters.applied_step, cause.what());
  }
  size_t averaged = 0, blocks = 0;
  for (const auto& offload : bound.offloads) {
    averaged += offload->averaged();
    blocks += offload->num_blocks();
  }
  if (now.released) {
    torn.emplace(
        cause.code(),
        fmt::format("the update of step {} stopped after {} of {} blocks, and the weights may have changed since: "
                    "load a checkpoint into new averages, or begin them again (reset()): {}",
                    step, averaged, blocks, cause.what()));
    under_way_.reset();
    throw Error(*torn);
  }
  now.stopped = true;
  fail(cause.code(),
       "the update of step {} stopped after {} of {} blocks: the others did not reach the host. The next call takes it "
       "up there, so leave "
       "the weights as they are until one goes through; where the device is lost, load a checkpoint into new averages: "
       "{}",
       step, averaged, blocks, cause.what());
}

void Average::Impl::finish_reading() {
  const bool of_the_host = bound.offloads.empty() || (options.overlap && !bound.backends.empty());
  if (torn || !under_way_ || under_way_->stopped || of_the_host || capturing()) return wait();
  const auto began = steady_clock::now();
  worker_->wait_for_part();
  under_way_->waited += seconds_since(began);
  if (!worker_->busy()) return wait();
  for (const auto& offload : bound.offloads) offload->release_weights();
  under_way_->released = true;
}

void Average::Impl::reset() {
  try {
    wait();
  } catch (const Error& error) {
    if (!torn && !under_way_) throw;
    torn.emplace(error);  // that update is given up, since its averages are
    under_way_.reset();
  }
  if (swap) fail(Code::kInvalidArgument, "reset() while weights and averages are swapped; swap back first");
  try {
    copy_parameters();
  } catch (const Error& cause) {
    torn.emplace(cause.code(),
                 fmt::format("reset() failed, and the averages are of no step; call it again: {}", cause.what()));
    throw Error(*torn);
  }
  torn.reset();
}

}  // namespace shardow
