// An update is a pure function of (schedules, counters, parameters, averages): plan_step() turns where training stands into the few numbers
// that a kernel needs, dispatch() hands them to each device once. Everything that could fail or allocate happens in bind().
#include "shardow/average.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "average/arena.h"
#include "average/checks.h"
#include "average/impl.h"
#include "average/replicas.h"
#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow {

using average::NonFiniteCount;
using base::fail;
using kernels::Form;

namespace {

/// Below this weight the increment of a quiet float32 weight is lost to rounding (docs/numerics.md), so kAuto rounds it stochastically.
constexpr double kStochasticBelow = 5e-5;
constexpr int64_t kAlignment = 64;

bool same_device(const Device& a, const Device& b) {
  return a.kind == b.kind && a.index == b.index;
}

bool same_addresses(std::span<const TensorView> a, std::span<const TensorView> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const TensorView& x, const TensorView& y) { return x.data == y.data && same_device(x.device, y.device); });
}

std::vector<TensorView> on(const Device& device, std::span<const TensorView> views, std::span<const TensorView> where) {
  std::vector<TensorView> found;
  for (size_t i = 0; i < views.size(); ++i) {
    if (same_device(where[i].device, device)) found.push_back(views[i]);
  }
  return found;
}

}  // namespace

Average::Impl::Impl(std::span<const TensorView> parameters, AverageOptions chosen) : options(std::move(chosen)) {
  average::check_options(options);
  average::check_parameters(parameters);
  average::check_devices(parameters, options.replicas != nullptr);
  whole.assign(parameters.begin(), parameters.end());
  parts = divide(whole);
  for (const TensorView& part : parts) {
    elements += part.region.size();
    const auto averaged = static_cast<int64_t>(options.schedules.size());
    bytes_per_update += byte_size(part.dtype, part.region.size()) + 2 * averaged * byte_size(options.dtype, part.region.size());
  }
  pool = std::make_unique<base::ThreadPool>(average::threads_for(elements, options.num_threads));
}

/// All that can fail is made first; then everything changes at once.
void Average::Impl::bind(std::span<const TensorView> parameters) {
  std::vector<TensorView> now(parameters.begin(), parameters.end()), divided = divide(now);
  auto made = make_backends(divided);
  whole.swap(now);
  parts.swap(divided);
  backends.swap(made);
}

/// The parts of `views` that this rank averages.
std::vector<TensorView> Average::Impl::divide(std::span<const TensorView> views) const {
  if (options.replicas == nullptr) return {views.begin(), views.end()};
  return average::parts_of(views, options.replicas->rank(), options.replicas->size());
}

/// One arena for all averages of all parameters, each starting at a multiple of 64 bytes.
void Average::Impl::allocate() {
  const Device device = parts.empty() ? Device{} : parts[0].device;
  std::vector<int64_t> begins;
  int64_t bytes = 0;
  for (const TensorView& part : parts) {
    if (part.device.kind != device.kind || part.device.index != device.index) {
      fail(Code::kUnsupported, "'{}' is on another device than '{}'; give the averages' memory yourself", part.name, parts[0].name);
    }
    begins.push_back(bytes);
    bytes += (byte_size(options.dtype, part.region.size()) + kAlignment - 1) / kAlignment * kAlignment;
  }
  const auto count = static_cast<int64_t>(options.schedules.size());
  const int64_t stride = device.kind == Device::Kind::kCpu ? average::arena_stride(bytes, static_cast<int>(count)) : bytes;
  memory = average::Memory(static_cast<size_t>((count - 1) * stride + bytes), device);
  averages.assign(options.schedules.size(), parts);
  for (size_t k = 0; k < averages.size(); ++k) {
    for (size_t i = 0; i < parts.size(); ++i) {
      averages[k][i].dtype = options.dtype;
      averages[k][i].data = memory.data() + static_cast<int64_t>(k) * stride + begins[i];
    }
  }
}

/// One backend for each device of `bound`, whose averages are ours.
std::vector<std::unique_ptr<average::Backend>> Average::Impl::make_backends(std::span<const TensorView> bound) const {
  std::vector<std::unique_ptr<average::Backend>> made;
  std::vector<Device> devices;
  for (const TensorView& part : bound) {
    if (std::none_of(devices.begin(), devices.end(), [&](const Device& known) { return same_device(known, part.device); })) {
      devices.push_back(part.device);
    }
  }
  for (const Device& device : devices) {
    const std::vector<TensorView> here = on(device, bound, bound);
    std::vector<std::vector<TensorView>> averaged;
    for (const auto& average : averages) averaged.push_back(on(device, average, bound));
    made.push_back(average::make_backend(device, here, averaged, *pool));
    if (options.rounding == Rounding::kStochastic) made.back()->prepare_noise();  // else before the first step that draws noise
  }
  return made;
}

void Average::Impl::copy_parameters() {
  for (const auto& backend : backends) backend->copy_parameters();
}

int64_t Average::Impl::next_step(std::optional<int64_t> step) const {
  if (!step) return counters.step + 1;
  if (*step <= counters.step) {
    fail(Code::kInvalidArgument, "update(step={}): step {} has been counted already; pass the number of optimizer steps taken, each once",
         *step, counters.step);
  }
  return *step;
}

UpdateReport Average::Impl::update(std::optional<int64_t> step, double samples, std::span<const Factors> given, Launch launch) {
  if (swap) fail(Code::kInvalidArgument, "update() while weights and averages are swapped would average the averages; swap back first");
  if (!std::isfinite(samples) || samples < 0) {
    fail(Code::kInvalidArgument, "update(samples={}): the number of training samples seen so far, 0 or more", samples);
  }
  UpdateReport report;
  if (launch == Launch::kNow && capturing()) return (capture(), report);
  const int64_t now = next_step(step);
  if (!copies_at(now) && now - counters.applied_step < options.update_every) {
    if (launch == Launch::kByReplay) {
      for (const auto& backend : backends) backend->prepare({}, false);
    }
    counters.step = now;
    return report;
  }
  const auto began = std::chrono::steady_clock::now();
  apply(report, now, samples, given, launch);
  seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return report;
}

/// Up to start_step, and the first update past it where none came before: the averages never begin with weights from long before.
bool Average::Impl::copies_at(int64_t step) const {
  return step <= options.start_step || (options.start_step > 0 && counters.applied_step == 0);
}

void Average::Impl::apply(UpdateReport& report, int64_t step, double samples, std::span<const Factors> given, Launch launch) {
  const kernels::Step planned = plan_step(step, samples, given, &report.factors);
  report.applied = true;
  report.bytes_moved = bytes_per_update;
  NonFiniteCount count;
  if (launch == Launch::kNow) {
    count = dispatch(planned);
  } else {
    for (const auto& backend : backends) backend->prepare(planned, draws_by_runs(planned));
  }
  report.non_finite = count.elements;
  counters.step = step;
  counters.applied_step = step;
  counters.applied_samples = samples;
  if (step > options.start_step) ++counters.updates;
  hold(count, step);
  if (options.non_finite == NonFinite::kRaise && count.elements > 0) {
    const size_t part = part_of(count.first);
    fail(Code::kInvalidArgument, "step {}: {} elements of the parameters are NaN or Inf, the first in '{}'; their averages are unchanged",
         step, count.elements, part < parts.size() ? parts[part].name : "?");
  }
}

/// Where training stands, in the numbers that a kernel needs. Throws what schedules throw, before anything has changed.
kernels::Step Average::Impl::plan_step(int64_t step, double samples, std::span<const Factors> given, Factors* first) const {
  kernels::Step planned{};
  planned.num_averages = static_cast<int32_t>(options.schedules.size());
  planned.hold = options.non_finite != NonFinite::kPropagate;
  planned.seed = options.seed;
  planned.step = step;
  const int64_t since_start = std::max<int64_t>(step - options.start_step, 1);
  const Progress progress{since_start, counters.updates, std::min(step - counters.applied_step, since_start), samples,
                          samples - counters.applied_samples};
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
  const auto [decay, weight] = factors;
  switch (options.rule) {
    case Rule::kMulAdd: return {Form::kMulAdd, decay, weight};
    case Rule::kTwoProducts: return {Form::kTwoProducts, decay, weight};
    case Rule::kDifference: return {Form::kDifference, decay, weight};
    case Rule::kFusedDifference: return {Form::kFusedDifference, decay, weight};
    case Rule::kQuotient: return {Form::kQuotient, decay, weight};
    case Rule::kLerp: break;
  }
  if (weight == 1) return {Form::kCopy, decay, weight};
  const bool stochastic = options.rounding == Rounding::kStochastic || (options.rounding == Rounding::kAuto && weight < kStochasticBelow);
  return {stochastic && weight > 0 ? Form::kStochastic : Form::kLerp, decay, weight};
}

bool Average::Impl::draws_by_runs(const kernels::Step& step) const {
  const auto needs_runs = [](const kernels::Step::One& one) { return one.form == Form::kStochastic || one.form == Form::kLerp; };
  const bool narrow = options.dtype == DType::kBF16 || options.dtype == DType::kF16;
  const std::span<const kernels::Step::One> used(step.averages.data(), options.schedules.size());
  return std::any_of(used.begin(), used.end(), [&](const auto& one) { return narrow ? needs_runs(one) : one.form == Form::kStochastic; });
}

NonFiniteCount Average::Impl::dispatch(const kernels::Step& step) {
  const bool by_runs = draws_by_runs(step);
  if (by_runs) {
    for (const auto& backend : backends) backend->prepare_noise();
  }
  NonFiniteCount total;
  for (const auto& backend : backends) {
    NonFiniteCount count = backend->update(step, by_runs);
    if (options.non_finite == NonFinite::kRaise && count.elements == 0)
      count = backend->read_count();  // CUDA: the price of raising is a wait
    total.elements += count.elements;
    if (total.first == nullptr) total.first = count.first;
  }
  return total;
}

/// Counts what was held, and remembers the first update that held anything.
void Average::Impl::hold(const NonFiniteCount& count, int64_t step) {
  if (count.elements == 0 || options.non_finite == NonFinite::kPropagate) return;
  counters.held_non_finite += count.elements;
  if (!met) met = Met{step, count.elements, part_of(count.first)};
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
  for (const auto& backend : backends) hold(backend->read_count(), counters.applied_step);
}

Average::Average(std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages, AverageOptions options)
    : impl_(std::make_unique<Impl>(parameters, std::move(options))) {
  average::check_averages(impl_->parts, averages, impl_->options);
  impl_->averages.assign(averages.begin(), averages.end());
  impl_->backends = impl_->make_backends(impl_->parts);
  if (!impl_->options.keep_values) impl_->copy_parameters();
}

Average::Average(std::span<const TensorView> parameters, AverageOptions options)
    : impl_(std::make_unique<Impl>(parameters, std::move(options))) {
  impl_->allocate();
  impl_->backends = impl_->make_backends(impl_->parts);
  impl_->copy_parameters();
}

Average::Average(Average&&) noexcept = default;
Average& Average::operator=(Average&&) noexcept = default;
Average::~Average() = default;

UpdateReport Average::update(std::optional<int64_t> step, double samples) {
  return impl_->update(step, samples);
}

UpdateReport Average::prepare_replay(std::optional<int64_t> step, double samples) {
  return impl_->update(step, samples, {}, Impl::Launch::kByReplay);
}

void Average::set_stream(int index, void* stream) {
  impl_->set_stream(index, stream);
}

UpdateReport Average::update_by(std::span<const Factors> factors, std::optional<int64_t> step) {
  if (factors.size() != size()) fail(Code::kInvalidArgument, "{} factors for {} averages", factors.size(), size());
  for (size_t k = 0; k < factors.size(); ++k) {
    if (std::isfinite(factors[k].decay) && std::isfinite(factors[k].weight)) continue;
    fail(Code::kInvalidArgument, "update_by(): average {} would get decay {} and weight {}; both must be finite", k, factors[k].decay,
         factors[k].weight);
  }
  return impl_->update(step, 0, factors);
}

UpdateReport Average::update(std::span<const TensorView> parameters, std::optional<int64_t> step, double samples) {
  bind(parameters);
  return impl_->update(step, samples);
}

void Average::bind(std::span<const TensorView> parameters) {
  average::check_same(impl_->whole, parameters);
  average::check_devices(parameters, impl_->options.replicas != nullptr);
  impl_->follow_streams(parameters);
  if (same_addresses(impl_->whole, parameters)) return;
  if (impl_->swap) fail(Code::kInvalidArgument, "parameters have moved while they hold averages; swap back before they move");
  impl_->bind(parameters);
}

void Average::reset() {
  if (impl_->swap) fail(Code::kInvalidArgument, "reset() while weights and averages are swapped; swap back first");
  impl_->copy_parameters();
}

size_t Average::size() const noexcept {
  return impl_->averages.size();
}

std::span<const TensorView> Average::views(size_t k) const {
  if (impl_->swap) fail(Code::kInvalidArgument, "the averages are in the parameters' memory while swapped; swap back first");
  if (k >= size()) fail(Code::kInvalidArgument, "average {} of {}", k, size());
  return impl_->averages[k];
}

AverageStats Average::stats() const {
  impl_->read_counts();
  const average::Counters& counters = impl_->counters;
  const auto averaged = static_cast<int64_t>(size());
  int64_t tables = 0;
  for (const auto& backend : impl_->backends) tables += backend->table_bytes();
  return {.step = counters.step,
          .updates = counters.updates,
          .parameters = static_cast<int64_t>(impl_->parts.size()),
          .elements = impl_->elements,
          .bytes = averaged * byte_size(impl_->options.dtype, impl_->elements),
          .bytes_moved = counters.applied_step > 0 ? impl_->bytes_per_update : 0,
          .seconds = impl_->seconds,
          .held_non_finite = counters.held_non_finite,
          .table_bytes = tables};
}

std::optional<NonFiniteReport> Average::non_finite() const {
  impl_->read_counts();
  if (!impl_->met) return std::nullopt;
  const auto [step, elements, part] = *impl_->met;
  return NonFiniteReport{step, elements, part < impl_->parts.size() ? impl_->parts[part].name : "?"};
}

void Average::forget_non_finite() noexcept {
  impl_->met.reset();
}

std::string Average::state() const {
  stats();  // brings the count up to date
  return average::to_json(impl_->options, impl_->counters);
}

void Average::set_state(std::string_view json, OptionsFrom options) {
  if (impl_->swap) fail(Code::kInvalidArgument, "set_state() while weights and averages are swapped; swap back first");
  const average::State state = average::state_from_json(json);
  if (state.options.schedules.size() != size()) {
    fail(Code::kInvalidArgument,
         "the saved state has {} averages of each parameter, this one keeps {}; make it with the same number of decays",
         state.options.schedules.size(), size());
  }
  impl_->set_state(state, options);
}

void Average::Impl::set_state(const average::State& state, OptionsFrom from) {
  if (from == OptionsFrom::kFile) {
    AverageOptions merged = average::with_options_of(state.options, options);
    try {
      average::check_options(merged);
    } catch (const Error& error) {
      fail(error.code(), "the saved state's options do not fit averages of dtype {} (go on with your own options instead): {}",
           dtype_name(options.dtype), error.what());
    }
    options = std::move(merged);
  }
  counters = state.counters;
  met.reset();
}

std::vector<OptionDifference> Average::differences(std::string_view json) const {
  return average::differences(average::state_from_json(json).options, impl_->options);
}

std::span<const Schedule> Average::schedules() const noexcept {
  return impl_->options.schedules;
}

}  // namespace shardow
