// An update is a pure function of (schedules, counters, parameters, averages): plan_step() turns where training stands
// into the few numbers that a kernel needs, dispatch() hands them to each device once.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <utility>

#include "average/impl.h"
#include "base/errors.h"
#include "base/turns.h"
#include "tensor/dtype.h"

namespace shardow {

using average::NonFiniteCount;
using base::fail;
using kernels::Form;

namespace {

/// Below this weight the increment of a quiet float32 weight is lost to rounding (docs/numerics.md), so kAuto rounds it
/// stochastically.
constexpr double kStochasticBelow = 5e-5;

}  // namespace

int64_t Average::Impl::next_step(std::optional<int64_t> step) const {
  constexpr int64_t kMost = int64_t{1} << 62;
  if (const int64_t last = step.value_or(counters.step); last >= kMost)
    fail(Code::kInvalidArgument, "update(step={}): steps are below 2^62", last);
  if (!step) return counters.step + 1;
  if (*step <= counters.step) {
    fail(Code::kInvalidArgument,
         "update(step={}): step {} has been counted already; pass the number of optimizer steps taken, each once",
         *step, counters.step);
  }
  return *step;
}

UpdateReport Average::Impl::update(std::optional<int64_t> step, double samples, std::span<const Factors> given,
                                   Launch launch) {
  if (launch == Launch::kByReplay && !bound.offloads.empty()) refuse_graph("prepare_replay()");
  std::exception_ptr last;  // the error of the update before, thrown when this one is under way, or refused, too
  try {
    wait();
  } catch (const Error&) {
    if (torn || under_way_) throw;
    last = std::current_exception();
  }
  UpdateReport report;
  try {
    report = begin_update(step, samples, given, launch);
  } catch (...) {
    if (!last) throw;
  }
  if (last) std::rethrow_exception(last);
  return report;
}

UpdateReport Average::Impl::begin_update(std::optional<int64_t> step, double samples, std::span<const Factors> given,
                                         Launch launch) {
  if (swap)
    fail(Code::kInvalidArgument,
         "update() while weights and averages are swapped would average the averages; swap back first");
  if (!std::isfinite(samples) || samples < 0) {
    fail(Code::kInvalidArgument, "update(samples={}): the number of training samples seen so far, 0 or more", samples);
  }
  UpdateReport report;
  if (launch == Launch::kNow && capturing()) return (capture(), report);
  const int64_t now = next_step(step);
  if (!copies_at(now) && now - counters.applied_step < options.update_every) {
    if (launch == Launch::kByReplay) static_cast<void>(prepare({}, false));
    counters.step = now;
    return report;
  }
  const auto began = std::chrono::steady_clock::now();
  apply(report, now, samples, given, launch);
  seconds = base::seconds_since(began);
  return report;
}

/// On all devices or on none.
NonFiniteCount Average::Impl::prepare(const kernels::Step& step, bool by_runs) {
  for (const auto& backend : bound.backends) backend->check_prepare(by_runs);
  NonFiniteCount count;
  for (const auto& backend : bound.backends) add(count, backend->prepare(step, by_runs));
  return count;
}

/// Up to start_step, and the first update past it where none came before: the averages never begin with weights from
/// long before.
bool Average::Impl::copies_at(int64_t step) const {
  return step <= options.start_step || (options.start_step > 0 && counters.applied_step == 0);
}

void Average::Impl::apply(UpdateReport& report, int64_t step, double samples, std::span<const Factors> given,
                          Launch launch) {
  const kernels::Step planned = plan_step(step, samples, given, &report.factors);
  report.applied = true;
  report.bytes_moved = bytes_per_update;
  NonFiniteCount count;
  if (launch == Launch::kNow) {
    for (const auto& backend : bound.backends) {
      if (draws_by_runs(planned)) backend->prepare_noise();  // may lack memory, which the caller hears at once
    }
    for (const auto& offload : bound.offloads) offload->begin();
    if (!options.overlap) count = dispatch(planned);
    if (worker_) {
      const bool changed = !options.overlap && !bound.backends.empty();  // what is not in the background is averaged
      under_way_ = UnderWay{.step = planned, .before = counters, .changed = changed};
      worker_->begin([this] { work(); });  // one pointer: nothing allocates
    }
  } else {
    count = prepare(planned, draws_by_runs(planned));
  }
  counters.step = step;
  counters.applied_step = step;
  counters.applied_samples = samples;
  if (step > options.start_step) ++counters.updates;
  hold(count, step);
  if (options.non_finite == NonFinite::kRaise && launch == Launch::kNow && !options.overlap) {
    for (const auto& backend :
         bound.backends) {  // CUDA: the price of raising is a wait; the update is made and counted whatever it meets
      const NonFiniteCount more = backend->read_count();
      hold(more, step);
      add(count, more);
    }
  }
  report.non_finite = count.elements + std::exchange(unreported_, 0);
  refuse_non_finite(count, step);
}

void Average::Impl::refuse_non_finite(const NonFiniteCount& count, int64_t step) const {
  if (options.non_finite == NonFinite::kRaise && count.elements > 0) {
    const size_t part = part_of(count.first);
    fail(Code::kInvalidArgument,
         "step {}: {} elements of the parameters are NaN or Inf, the first in '{}'. Their averages are held, all "
         "others are those of this "
         "step, which is counted: go on with the next step, or load a checkpoint from before the weights diverged",
         step, count.elements, part < parts.size() ? parts[part].name : "?");
  }
}

Progress Average::Impl::progress_at(int64_t step, double samples) const noexcept {
  const int64_t since_start = std::max<int64_t>(step - options.start_step, 1);
  return {since_start, counters.updates, std::min(step - counters.applied_step, since_start), samples,
          samples - counters.applied_samples};
}

/// Where training stands, in the numbers that a kernel needs. Throws what schedules throw, before anything has changed.
kernels::Step Average::Impl::plan_step(int64_t step, double samples, std::span<const Factors> given,
                                       Factors* first) const {
  kernels::Step planned{};
  planned.num_averages = static_cast<int32_t>(options.schedules.size());
  planned.hold = options.non_finite != NonFinite::kPropagate;
  planned.seed = options.seed;
  planned.step = step;
  const Progress progress = progress_at(step, samples);
  for (size_t k = 0; k < options.schedules.size(); ++k) {
    if (copies_at(step)) {
      planned.averages[k] = {Form::kCopy, 0, 1};
    } else {
      planned.averages[k] = plan_one(given.empty() ? options.schedules[k].factors(progress) : given[k]);
    }
  }
  *first = {planned.averages[0].decay, planned.averages[0].weight};
  return planned;
}

kernels::Step::One Average::Impl::plan_one(const Factors& factors) const {
  constexpr Form kForms[] = {
      Form::kLerp,       Form::kMulAdd,          Form::kTwoProducts,
      Form::kDifference, Form::kFusedDifference, Form::kQuotient};  // of the rules, in their order
  const auto [decay, weight] = factors;
  Form form = kForms[static_cast<size_t>(options.rule)];
  if (form == Form::kLerp) {
    const bool stochastic =
        options.rounding == Rounding::kStochastic || (options.rounding == Rounding::kAuto && weight < kStochasticBelow);
    if (stochastic && weight > 0) form = Form::kStochastic;
    if (weight == 1) form = Form::kCopy;
  }
  return {form, decay, weight};
}

bool Average::Impl::draws_by_runs(const kernels::Step& step) const {
  const bool narrow = dtype_bits(options.dtype) == 16;
  const auto draws = [&](const kernels::Step::One& one) {
    return one.form == Form::kStochastic || (narrow && one.form == Form::kLerp);
  };
  return std::any_of(step.averages.begin(), step.averages.begin() + step.num_averages, draws);
}

NonFiniteCount Average::Impl::dispatch(const kernels::Step& step) {
  const bool by_runs = draws_by_runs(step);
  NonFiniteCount total;
  try {
    for (const auto& backend : bound.backends) add(total, backend->update(step, by_runs));
  } catch (const std::exception& cause) {
    if (!other_memory) throw;  // kernels begin all or nothing
    torn.emplace(Code::kInternal,
                 fmt::format("the update of step {} stopped, and some averages may be of the step before: load a "
                             "checkpoint into new averages, or begin them again (reset()): {}",
                             step.step, cause.what()));
    throw Error(*torn);
  }
  return total;
}

/// Counts what was held, and remembers the first update that held anything.
void Average::Impl::hold(const NonFiniteCount& count, int64_t step) {
  if (count.elements == 0 || options.non_finite == NonFinite::kPropagate) return;
  counters.held_non_finite += count.elements;
  const size_t part = part_of(count.first);
  if (!met) met = Met{step, 0, part};
  if (met->step != step) return;
  met->elements += count.elements;  // devices and the host tell of their parts one after the other
  met->part = std::min(met->part, part);
}

/// Keeps the first part of those that devices and the host met.
void Average::Impl::add(NonFiniteCount& count, const NonFiniteCount& more) const {
  count.elements += more.elements;
  if (more.first != nullptr && part_of(more.first) < part_of(count.first)) count.first = more.first;
}

size_t Average::Impl::part_of(const void* element) const {
  const auto* at = static_cast<const std::byte*>(element);
  const auto holds = [&](const TensorView& view) {
    const auto* begin = static_cast<const std::byte*>(view.data);
    return at >= begin && at < begin + byte_size(view.dtype, view.region.size());
  };
  return static_cast<size_t>(std::find_if(parts.begin(), parts.end(), holds) - parts.begin());
}

/// What CUDA updates met since the last call.
void Average::Impl::read_counts() {
  for (const auto& backend : bound.backends) hold(backend->read_count(), counters.applied_step);
}

}  // namespace shardow
