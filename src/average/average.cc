// The face of an Average, and its state; what it does is in binding.cc, update.cc, swap.cc and streams.cc.
#include "shardow/average.h"

#include <algorithm>
#include <cmath>

#include "average/checks.h"
#include "average/impl.h"
#include "average/schedule_table.h"
#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow {

using base::fail;

Average::Average(std::vector<TensorView> parameters, std::vector<std::vector<TensorView>> averages,
                 AverageOptions options, std::shared_ptr<average::OtherMemory> other)
    : impl_(std::make_unique<Impl>(std::move(parameters), std::move(options), std::move(other))) {
  average::check_averages(impl_->parts, averages, impl_->options);
  average::check_apart(impl_->whole(), averages);
  impl_->averages = std::move(averages);
  impl_->bound = impl_->make_bound(impl_->parts);
  if (!impl_->options.keep_values) impl_->copy_parameters();
}

Average::Average(std::span<const TensorView> parameters, AverageOptions options)
    : impl_(std::make_unique<Impl>(std::vector(parameters.begin(), parameters.end()), std::move(options), nullptr)) {
  average::check_apart(impl_->whole());
  average::check_overlap(impl_->parts, impl_->parts, impl_->options);
  impl_->allocate();
  impl_->bound = impl_->make_bound(impl_->parts);
  impl_->copy_parameters();
}

Average::Average(Average&&) noexcept = default;
Average& Average::operator=(Average&&) noexcept = default;
Average::~Average() = default;

UpdateReport Average::update(std::optional<int64_t> step, double samples) {
  const auto use = impl_->use("update()");
  return impl_->update(step, samples);
}

UpdateReport Average::prepare_replay(std::optional<int64_t> step, double samples) {
  const auto use = impl_->use("prepare_replay()");
  return impl_->update(step, samples, {}, Impl::Launch::kByReplay);
}

void Average::wait() const {
  const auto use = impl_->use("wait()");
  impl_->wait();
}

void Average::finish_reading() const {
  const auto use = impl_->use("finish_reading()");
  impl_->finish_reading();
}

void Average::set_stream(int index, void* stream) {
  const auto use = impl_->use("set_stream()");
  impl_->set_stream(index, stream);
}

UpdateReport Average::update_by(std::span<const Factors> factors, std::optional<int64_t> step) {
  const auto use = impl_->use("update_by()");
  if (factors.size() != size()) fail(Code::kInvalidArgument, "{} factors for {} averages", factors.size(), size());
  for (size_t k = 0; k < factors.size(); ++k) {
    if (std::isfinite(factors[k].decay) && std::isfinite(factors[k].weight)) continue;
    fail(Code::kInvalidArgument, "update_by(): average {} would get decay {} and weight {}; both must be finite", k,
         factors[k].decay, factors[k].weight);
  }
  return impl_->update(step, 0, factors);
}

UpdateReport Average::update(std::span<const TensorView> parameters, std::optional<int64_t> step, double samples) {
  const auto use = impl_->use("update()");
  bind(parameters);
  return impl_->update(step, samples);
}

void Average::reset() {
  const auto use = impl_->use("reset()");
  impl_->reset();
}

size_t Average::size() const noexcept {
  return impl_->averages.size();
}

std::span<const TensorView> Average::views(size_t k) const {
  const auto use = impl_->use("views()");
  impl_->wait();
  if (impl_->swap)
    fail(Code::kInvalidArgument, "the averages are in the parameters' memory while swapped; swap back first");
  if (k >= size()) fail(Code::kInvalidArgument, "average {} of {}", k, size());
  return impl_->averages[k];
}

AverageStats Average::stats() const {
  const auto look = impl_->look();
  impl_->wait();
  impl_->read_counts();
  const average::Counters& counters = impl_->counters;
  const auto averaged = static_cast<int64_t>(size());
  int64_t tables = 0;
  int64_t offloaded = 0;
  for (const auto& backend : impl_->bound.backends) tables += backend->table_bytes();
  for (const auto& offload : impl_->bound.offloads) {
    tables += offload->table_bytes();
    offloaded += offload->bytes();
  }
  return {.step = counters.step,
          .updates = counters.updates,
          .parameters = static_cast<int64_t>(impl_->parts.size()),
          .elements = impl_->elements,
          .bytes = averaged * byte_size(impl_->options.dtype, impl_->elements),
          .bytes_moved = counters.applied_step > 0 ? impl_->bytes_per_update : 0,
          .seconds = impl_->seconds,
          .offload_bytes = impl_->offload_bytes_before + offloaded,
          .hidden_seconds = impl_->hidden_seconds,
          .waited_seconds = impl_->waited_seconds,
          .held_non_finite = counters.held_non_finite,
          .table_bytes = tables};
}

Progress Average::progress(double samples) const noexcept {
  return impl_->progress_at(impl_->counters.step + 1, samples);
}

std::optional<NonFiniteReport> Average::non_finite() const {
  const auto use = impl_->use("non_finite()");
  impl_->wait();
  impl_->read_counts();
  if (!impl_->met) return std::nullopt;
  const auto [step, elements, part] = *impl_->met;
  return NonFiniteReport{step, elements, part < impl_->parts.size() ? impl_->parts[part].name : "?"};
}

void Average::forget_non_finite() noexcept {
  impl_->met.reset();
}

std::string Average::state() const {
  const auto use = impl_->use("state()");
  stats();  // brings the count up to date
  return average::to_json(impl_->options, impl_->counters);
}

void Average::set_state(std::string_view json, OptionsFrom options) {
  const auto use = impl_->use("set_state()");
  impl_->wait();
  if (impl_->swap) fail(Code::kInvalidArgument, "set_state() while weights and averages are swapped; swap back first");
  const average::State state = average::state_from_json(json, impl_->options);
  if (state.options.schedules.size() != size()) {
    fail(Code::kInvalidArgument,
         "the saved state has {} averages of each parameter, this one keeps {}; make it with the same number of decays",
         state.options.schedules.size(), size());
  }
  impl_->set_state(state, options);
}

void Average::Impl::restart() {
  const auto restarts = use("restart()");
  reset();
  read_counts();
  counters = {};
  met.reset();
}

void Average::Impl::set_state(const average::State& state, OptionsFrom from) {
  if (from == OptionsFrom::kFile) {
    AverageOptions merged = state.options;
    merged.dtype = options.dtype;  // that of memory
    try {
      average::check_options(merged, other_memory == nullptr);
    } catch (const Error& error) {
      fail(error.code(),
           "the saved state's options do not fit averages of dtype {} (go on with your own options instead): {}",
           dtype_name(options.dtype), error.what());
    }
    options = std::move(merged);
  }
  average::take_settable(state.options.schedules, options.schedules);
  read_counts();  // a device's, of updates before: they are not the new counters'
  counters = state.counters;
  met.reset();
}

std::vector<OptionDifference> Average::differences(std::string_view json) const {
  const auto use = impl_->use("differences()");
  return average::differences(average::state_from_json(json).options, impl_->options);
}

std::span<const Schedule> Average::schedules() const noexcept {
  return impl_->options.schedules;
}

void Average::set_decay(double decay) {
  const auto use = impl_->use("set_decay()");
  std::vector<Schedule>& schedules = impl_->options.schedules;
  const auto settable = std::find_if(schedules.begin(), schedules.end(), average::Schedules::is_settable);
  if (settable == schedules.end()) {
    fail(Code::kInvalidArgument,
         "set_decay({}): the schedule {} says what the decay is; make the averages with settable({}) to set it", decay,
         schedules.front().key(), decay);
  }
  *settable = Schedule::settable(decay);
}

std::vector<double> Average::decays() const {
  const auto look = impl_->look();
  Progress alone = progress(impl_->counters.applied_samples + 1);
  alone.delta = 1;
  std::vector<double> decays;
  for (const Schedule& schedule : schedules()) {
    try {
      decays.push_back(schedule.factors(alone).decay);
    } catch (const Error&) {
      decays.push_back(std::nan(""));
    }
  }
  return decays;
}

}  // namespace shardow
