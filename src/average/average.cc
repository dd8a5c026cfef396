// The public calls of Average: each refuses concurrent use, then calls one of the four members of Impl.
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

namespace {

std::string names_of(std::span<const TensorView> views) {
  if (views.empty()) return "nothing";
  return views.size() == 1 ? fmt::format("'{}'", views[0].name)
                           : fmt::format("'{}' and {} more", views[0].name, views.size() - 1);
}

AverageOptions checked(AverageOptions options, bool of_kernels) {
  average::check_options(options, of_kernels);
  return options;
}

}  // namespace

Average::Impl::Impl(std::vector<TensorView> parameters, AverageOptions chosen,
                    std::shared_ptr<average::OtherMemory> others)
    : user(names_of(parameters)),
      clock{{}, checked(std::move(chosen), others == nullptr)},
      storage(std::move(parameters), clock.options, std::move(others)),
      updater(clock, storage),
      swap(user, clock, storage, updater) {}

Average::Average(std::vector<TensorView> parameters, std::vector<std::vector<TensorView>> averages,
                 AverageOptions options, std::shared_ptr<average::OtherMemory> other)
    : impl_(std::make_unique<Impl>(std::move(parameters), std::move(options), std::move(other))) {
  impl_->storage.take(std::move(averages));
  if (!impl_->clock.options.keep_values) impl_->storage.copy_parameters();
}

Average::Average(std::span<const TensorView> parameters, AverageOptions options)
    : impl_(std::make_unique<Impl>(std::vector(parameters.begin(), parameters.end()), std::move(options), nullptr)) {
  impl_->storage.allocate();
  impl_->storage.copy_parameters();
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
  return impl_->update(step, samples, {}, average::Updater::Launch::kByReplay);
}

void Average::wait() const {
  const auto use = impl_->use("wait()");
  impl_->updater.wait();
}

void Average::finish_reading() const {
  const auto use = impl_->use("finish_reading()");
  impl_->updater.finish_reading();
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
  return impl_->storage.averages.size();
}

std::span<const TensorView> Average::views(size_t k) const {
  const auto use = impl_->use("views()");
  impl_->updater.wait();
  impl_->swap.refuse("the averages are in the parameters' memory while swapped");
  if (k >= size()) fail(Code::kInvalidArgument, "average {} of {}", k, size());
  return impl_->storage.averages[k];
}

AverageStats Average::stats() const {
  const auto look = impl_->look();
  const auto& [_, clock, storage, updater, swap] = *impl_;
  impl_->updater.wait();
  impl_->updater.read_counts();
  const average::Counters& counters = clock.counters;
  return {.step = counters.step,
          .updates = counters.updates,
          .parameters = static_cast<int64_t>(storage.parts.size()),
          .elements = storage.elements,
          .bytes = static_cast<int64_t>(size()) * byte_size(clock.options.dtype, storage.elements),
          .bytes_moved = counters.applied_step > 0 ? storage.bytes_per_update : 0,
          .seconds = updater.seconds().last,
          .offload_bytes = storage.offload_bytes(),
          .hidden_seconds = updater.seconds().hidden,
          .waited_seconds = updater.seconds().waited,
          .held_non_finite = counters.held_non_finite,
          .table_bytes = storage.table_bytes()};
}

Progress Average::progress(double samples) const noexcept {
  return impl_->clock.progress(impl_->clock.counters.step + 1, samples);
}

std::optional<NonFiniteReport> Average::non_finite() const {
  const auto use = impl_->use("non_finite()");
  impl_->updater.wait();
  impl_->updater.read_counts();
  return impl_->updater.non_finite();
}

void Average::forget_non_finite() noexcept {
  impl_->updater.forget_non_finite();
}

std::string Average::state() const {
  const auto use = impl_->use("state()");
  stats();  // reads what devices have counted
  return impl_->clock.to_json();
}

void Average::set_state(std::string_view json, OptionsFrom options) {
  const auto use = impl_->use("set_state()");
  auto& [_, clock, storage, updater, swap] = *impl_;
  updater.wait();
  swap.refuse("set_state() while weights and averages are swapped");
  average::Clock next = clock.with(average::clock_from_json(json, clock.options), options, storage.other == nullptr);
  updater.read_counts();  // of earlier updates on a device: they must not go into the new counters
  clock = std::move(next);
  updater.forget_non_finite();
}

std::vector<OptionDifference> Average::differences(std::string_view json) const {
  const auto use = impl_->use("differences()");
  return average::differences(average::clock_from_json(json).options, impl_->clock.options);
}

std::span<const Schedule> Average::schedules() const noexcept {
  return impl_->clock.options.schedules;
}

void Average::set_decay(double decay) {
  const auto use = impl_->use("set_decay()");
  std::vector<Schedule>& schedules = impl_->clock.options.schedules;
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
  return impl_->clock.decays();
}

void Average::bind(std::span<const TensorView> parameters) {
  const auto use = impl_->use("bind()");
  auto& [_, clock, storage, updater, swap] = *impl_;
  average::check_same(storage.whole(), parameters);
  average::check_devices(parameters, clock.options);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Device& is = parameters[i].device;
    if (is.kind == Device::Kind::kCuda && is.stream != storage.whole()[i].device.stream)
      impl_->set_stream(is.index, is.stream);
  }
  const auto address = [](const TensorView& view) { return view.data; };
  if (std::ranges::equal(storage.whole(), parameters, {}, address, address)) return;
  average::check_apart(parameters, storage.averages);
  updater.wait();
  swap.refuse("parameters have moved while they hold averages");
  updater.read_counts();  // of tables that are about to go
  storage.bind(parameters);
}

void Average::swap_in(size_t k) {
  const auto use = impl_->use("swap_in()");
  impl_->swap.in(impl_->storage.whole(), k);
}

void Average::swap_in(std::span<const TensorView> weights, size_t k) {
  const auto use = impl_->use("swap_in()");
  impl_->swap.in(weights, k);
}

void Average::swap_out() {
  const auto use = impl_->use("swap_out()");
  impl_->swap.out();
}

bool Average::swapped() const noexcept {
  return impl_->swap.record().has_value();
}

Swapped::~Swapped() {
  try {
    ema_.swap_out();
  } catch (...) {  // the swap stays open, and the next call reports it
  }
}

UpdateReport Average::Impl::update(std::optional<int64_t> step, double samples, std::span<const Factors> factors,
                                   average::Updater::Launch launch) {
  swap.refuse("update() while weights and averages are swapped would average the averages");
  return updater.update(step, samples, factors, launch);
}

void Average::Impl::set_stream(int index, void* stream) {
  storage.set_stream(index, stream);
  swap.set_stream(index, stream);
}

void Average::Impl::reset() {
  swap.refuse("reset() while weights and averages are swapped");
  updater.reset();
}

void Average::Impl::restart() {
  const auto restarts = use("restart()");
  reset();
  updater.read_counts();
  clock.counters = {};
  updater.forget_non_finite();
}

}  // namespace shardow
