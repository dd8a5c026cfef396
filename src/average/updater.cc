// An update is a pure function of (clock, parameters, averages): Clock::plan() turns the counters of training into the
// few numbers that a kernel needs, and dispatch() hands them to each device once. In the background the caller plans,
// and a thread of the Average does the work while the caller goes on. No other thread touches averages until wait(),
// with which every other call begins. With options.overlap all work is in the background; averages on the host of
// weights on a device are always updated there.
//
// An update of averages on the host of weights on a device (offload.h) has these steps, which may fail:
//   1. The device notes how far the weights' stream has come (begin(), on the caller's thread); copies come after that.
//   2. Copies begin, as many as the ring holds.
//   3. What fits the ring is waited for. Until here nothing has changed: a failure ends the update, and the averages
//      are those of the last one.
//   4. Block by block: wait for its copies, average it, begin the next copies. An exact way back would need a copy of
//      the averages, so a failure leaves the update under way, and each later call takes it up with the block where it
//      stopped. That is right as long as the weights have not changed, so finish_reading(), which lets them change,
//      throws as well.
//   5. All copies have begun: part_done(). From here on finish_reading() has the device wait for the last one, and the
//      host goes on. A failure of a copy under way is a failure of the device; blocks that it has torn stay so, and are
//      refused until reset().
#include "average/updater.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <utility>

#include "average/chunk_table.h"
#include "base/errors.h"
#include "base/turns.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

using base::fail;
using base::seconds_since;
using std::chrono::steady_clock;

[[noreturn]] void refuse_graph(const char* what) {
  fail(Code::kUnsupported,
       "{}: the averages are on the host, whose threads do what no graph repeats; capture the step without it, and "
       "call update() after each replay",
       what);
}

}  // namespace

UpdateReport Updater::update(std::optional<int64_t> step, double samples, std::span<const Factors> factors,
                             Launch launch) {
  if (launch == Launch::kByReplay && !storage_.bound.offloads.empty()) refuse_graph("prepare_replay()");
  std::exception_ptr last;  // the error of the update before, thrown when this one is under way, or refused, too
  try {
    wait();
  } catch (const Error&) {
    if (torn_ || under_way_) throw;
    last = std::current_exception();
  }
  UpdateReport report;
  try {
    report = begin(step, samples, factors, launch);
  } catch (...) {
    if (!last) throw;
  }
  if (last) std::rethrow_exception(last);
  return report;
}

UpdateReport Updater::begin(std::optional<int64_t> step, double samples, std::span<const Factors> factors,
                            Launch launch) {
  if (!std::isfinite(samples) || samples < 0) {
    fail(Code::kInvalidArgument, "update(samples={}): the number of training samples seen so far, 0 or more", samples);
  }
  UpdateReport report;
  if (launch == Launch::kNow && storage_.capturing()) return (capture(), report);
  const int64_t next_step = clock_.next(step);
  if (clock_.skips(next_step)) {
    if (launch == Launch::kByReplay) static_cast<void>(prepare({}, false));
    clock_.counters.step = next_step;
    return report;
  }
  const auto began = steady_clock::now();
  apply(report, clock_.plan(next_step, samples, factors), samples, launch);
  seconds_.last = seconds_since(began);
  return report;
}

void Updater::apply(UpdateReport& report, const kernels::Step& step, double samples, Launch launch) {
  const bool overlaps = clock_.options.overlap;
  const auto& [backends, offloads] = storage_.bound;
  report = {true, 0, storage_.bytes_per_update, {step.averages[0].decay, step.averages[0].weight}};
  NonFiniteCount count;
  if (launch == Launch::kNow) {
    for (const auto& backend : backends) {
      if (clock_.draws_noise(step)) backend->prepare_noise();  // may lack memory: the caller gets the error at once
    }
    for (const auto& offload : offloads) offload->begin();
    if (!overlaps) count = dispatch(step);
    if (storage_.works_in_background()) {
      const bool changed = !overlaps && !backends.empty();  // what is not in the background is averaged
      under_way_ = UnderWay{.step = step, .before = clock_.counters, .changed = changed};
      worker_.begin([this] { work(); });  // one pointer: nothing allocates
    }
  } else {
    count = prepare(step, clock_.draws_noise(step));
  }
  clock_.count(step.step, samples);
  hold(count, step.step);
  if (clock_.options.non_finite == NonFinite::kRaise && launch == Launch::kNow && !overlaps) {
    for (const auto& backend : backends) {
      // CUDA: the price of raising is a wait; the update is made and counted whatever it meets
      const NonFiniteCount more = backend->read_count();
      hold(more, step.step);
      add(count, more);
    }
  }
  report.non_finite = count.elements + std::exchange(unreported_, 0);
  refuse_non_finite(count, step.step);
}

/// Captures launches that a graph repeats; prepare_replay() gives them their numbers.
void Updater::capture() {
  if (!storage_.bound.offloads.empty()) refuse_graph("update() while its stream is captured");
  kernels::Step step{};
  step.num_averages = static_cast<int32_t>(clock_.options.schedules.size());
  for (const auto& backend : storage_.bound.backends) {
    if (backend->capturing()) backend->capture(step);
  }
}

/// Prepares a replay on all devices or on none.
NonFiniteCount Updater::prepare(const kernels::Step& step, bool by_runs) {
  for (const auto& backend : storage_.bound.backends) backend->check_prepare(by_runs);
  NonFiniteCount count;
  for (const auto& backend : storage_.bound.backends) add(count, backend->prepare(step, by_runs));
  return count;
}

NonFiniteCount Updater::dispatch(const kernels::Step& step) {
  const bool by_runs = clock_.draws_noise(step);
  NonFiniteCount total;
  try {
    for (const auto& backend : storage_.bound.backends) add(total, backend->update(step, by_runs));
  } catch (const std::exception& cause) {
    if (!storage_.other) throw;  // kernels begin all or nothing
    torn_.emplace(Code::kInternal,
                  fmt::format("the update of step {} stopped, and some averages may be of the step before: load a "
                              "checkpoint into new averages, or begin them again (reset()): {}",
                              step.step, cause.what()));
    throw Error(*torn_);
  }
  return total;
}

/// Runs on the worker's thread; goes on where the update stopped, if it did.
void Updater::work() {
  UnderWay& update = *under_way_;
  const auto began = steady_clock::now();
  const bool by_runs = clock_.draws_noise(update.step);
  const auto fetch = [&](Offload& source) {
    source.fetch();
    if (std::all_of(storage_.bound.offloads.begin(), storage_.bound.offloads.end(),
                    [](const auto& offload) { return offload->fetched(); }))
      worker_.part_done();
  };
  try {
    for (const auto& offload : storage_.bound.offloads) fetch(*offload);
    for (const auto& offload : storage_.bound.offloads) {
      if (offload->fits()) offload->arrive();
    }
    for (const auto& offload : storage_.bound.offloads) {
      while (!offload->done()) {
        add(update.count, offload->next(update.step, by_runs));
        update.changed = true;
        fetch(*offload);
      }
    }
    if (clock_.options.overlap) add(update.count, dispatch(update.step));
  } catch (...) {
    for (const auto& offload : storage_.bound.offloads) offload->stop();
    update.seconds += seconds_since(began);
    throw;
  }
  update.seconds += seconds_since(began);
}

void Updater::wait() {
  if (torn_) throw Error(*torn_);
  if (!under_way_) return;
  const auto began = steady_clock::now();
  if (std::exchange(under_way_->stopped, false)) worker_.begin([this] { work(); });
  try {
    worker_.wait();
  } catch (const Error& cause) {
    under_way_->waited += seconds_since(began);
    stopped(cause);
  } catch (const std::exception& cause) {
    stopped(Error(Code::kInternal, cause.what()));
  }
  UnderWay ended = *under_way_;
  under_way_.reset();
  ended.waited += seconds_since(began);
  seconds_.last = ended.seconds;
  seconds_.waited += ended.waited;
  seconds_.hidden += std::max(ended.seconds - ended.waited, 0.0);
  unreported_ += ended.count.elements;
  hold(ended.count, ended.step.step);
  refuse_non_finite(ended.count, ended.step.step);
}

/// Throws for the update under way, which has failed, and undoes its counts where no average has changed.
void Updater::stopped(const Error& cause) {
  UnderWay& update = *under_way_;
  const int64_t step = update.step.step;
  if (!update.changed) {
    clock_.counters.updates = update.before.updates;
    clock_.counters.applied_step = update.before.applied_step;
    clock_.counters.applied_samples = update.before.applied_samples;
    seconds_.waited += update.waited;
    under_way_.reset();
    fail(cause.code(),
         "the update of step {} was not made, since weights did not reach the host; the averages are those of step {}, "
         "and the next update "
         "makes up for it: {}",
         step, clock_.counters.applied_step, cause.what());
  }
  size_t averaged = 0, blocks = 0;
  for (const auto& offload : storage_.bound.offloads) {
    averaged += offload->averaged();
    blocks += offload->num_blocks();
  }
  if (update.released) {
    torn_.emplace(
        cause.code(),
        fmt::format("the update of step {} stopped after {} of {} blocks, and the weights may have changed since: "
                    "load a checkpoint into new averages, or begin them again (reset()): {}",
                    step, averaged, blocks, cause.what()));
    under_way_.reset();
    throw Error(*torn_);
  }
  update.stopped = true;
  fail(cause.code(),
       "the update of step {} stopped after {} of {} blocks: the others did not reach the host. The next call takes it "
       "up there, so leave "
       "the weights as they are until one goes through; where the device is lost, load a checkpoint into new averages: "
       "{}",
       step, averaged, blocks, cause.what());
}

void Updater::finish_reading() {
  const bool of_the_host =
      storage_.bound.offloads.empty() || (clock_.options.overlap && !storage_.bound.backends.empty());
  if (torn_ || !under_way_ || under_way_->stopped || of_the_host || storage_.capturing()) return wait();
  const auto began = steady_clock::now();
  worker_.wait_for_part();
  under_way_->waited += seconds_since(began);
  if (!worker_.busy()) return wait();
  for (const auto& offload : storage_.bound.offloads) offload->release_weights();
  under_way_->released = true;
}

void Updater::reset() {
  try {
    wait();
  } catch (const Error& error) {
    if (!torn_ && !under_way_) throw;
    torn_.emplace(error);  // that update is given up, since its averages are
    under_way_.reset();
  }
  try {
    storage_.copy_parameters();
  } catch (const Error& cause) {
    torn_.emplace(cause.code(),
                  fmt::format("reset() failed, and the averages are of no step; call it again: {}", cause.what()));
    throw Error(*torn_);
  }
  torn_.reset();
}

void Updater::refuse_non_finite(const NonFiniteCount& count, int64_t step) const {
  if (clock_.options.non_finite == NonFinite::kRaise && count.elements > 0) {
    fail(Code::kInvalidArgument,
         "step {}: {} elements of the parameters are NaN or Inf, the first in '{}'. Their averages are held, all "
         "others are those of this step, which is counted: go on with the next step, or load a checkpoint from before "
         "the weights diverged",
         step, count.elements, name_of(part_of(count)));
  }
}

/// Counts what was held, and remembers the first update that held anything.
void Updater::hold(const NonFiniteCount& count, int64_t step) {
  if (count.elements == 0 || clock_.options.non_finite == NonFinite::kPropagate) return;
  clock_.counters.held_non_finite += count.elements;
  const size_t part = part_of(count);
  if (!met_) met_ = Met{step, 0, part};
  if (met_->step != step) return;
  met_->elements += count.elements;  // devices and the host report their parts one after the other
  met_->part = std::min(met_->part, part);
}

/// Adds counts of devices and the host, and keeps the first of the parts that they name.
void Updater::add(NonFiniteCount& count, const NonFiniteCount& more) const {
  if (more.elements > 0 && part_of(more) < part_of(count)) count.tensor = more.tensor;
  count.elements += more.elements;
}

size_t Updater::part_of(const NonFiniteCount& count) const {
  const auto& parts = storage_.parts;
  const auto has = [&](const TensorView& view) { return hash_name(view.name) == count.tensor; };
  return static_cast<size_t>(std::find_if(parts.begin(), parts.end(), has) - parts.begin());
}

std::string Updater::name_of(size_t part) const {
  return part < storage_.parts.size() ? storage_.parts[part].name : "?";
}

std::optional<NonFiniteReport> Updater::non_finite() const {
  if (!met_) return std::nullopt;
  return NonFiniteReport{met_->step, met_->elements, name_of(met_->part)};
}

void Updater::read_counts() {
  for (const auto& backend : storage_.bound.backends) hold(backend->read_count(), clock_.counters.applied_step);
}

}  // namespace shardow::average
