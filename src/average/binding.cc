// The memory that an Average works on: the parameters' parts on this rank, the averages, and a backend for each device.
// Everything that could fail or allocate happens here, before an update.
#include <algorithm>

#include "average/checks.h"
#include "average/impl.h"
#include "average/plan.h"
#include "average/replicas.h"
#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow {

using base::fail;

namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kPeriod = int64_t{64} << 20;
constexpr int64_t kCached = int64_t{1} << 20;  // bytes: smaller averages stay in caches, where none of this was seen

bool same_device(const Device& a, const Device& b) {
  return a.kind == b.kind && a.index == b.index;
}

bool same_addresses(std::span<const TensorView> a, std::span<const TensorView> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const TensorView& x, const TensorView& y) {
    return x.data == y.data && same_device(x.device, y.device);
  });
}

/// Views that are averaged together: parameters on one device, and where their averages are.
struct Place {
  Device device;
  bool offloaded;
  std::vector<TensorView> parameters = {};
  std::vector<std::vector<TensorView>> averages = {};  // [k], parallel to parameters
};

/// Devices come first: they refuse a replay before the host, which does its part at once, has changed anything.
std::vector<Place> places_of(std::span<const TensorView> parameters,
                             std::span<const std::vector<TensorView>> averages) {
  std::vector<Place> places;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Device& device = parameters[i].device;
    const bool offloaded = average::is_offloaded(parameters[i], averages[0][i]);
    auto place = std::find_if(places.begin(), places.end(), [&](const Place& one) {
      return same_device(one.device, device) && one.offloaded == offloaded;
    });
    if (place == places.end()) {
      place = places.insert(place, {device, offloaded});
      place->averages.resize(averages.size());
    }
    place->parameters.push_back(parameters[i]);
    for (size_t k = 0; k < averages.size(); ++k) place->averages[k].push_back(averages[k][i]);
  }
  std::stable_partition(places.begin(), places.end(),
                        [](const Place& place) { return place.device.kind != Device::Kind::kCpu; });
  return places;
}

std::string names_of(std::span<const TensorView> views) {
  if (views.empty()) return "nothing";
  return views.size() == 1 ? fmt::format("'{}'", views[0].name)
                           : fmt::format("'{}' and {} more", views[0].name, views.size() - 1);
}

}  // namespace

int64_t average::arena_stride(int64_t bytes, int num_averages) {
  if (num_averages < 2 || bytes < kCached) return bytes;
  const int64_t apart = kPeriod / num_averages / kAlignment * kAlignment;
  return bytes + ((apart - bytes) % kPeriod + kPeriod) % kPeriod;
}

Average::Impl::Impl(std::vector<TensorView> parameters, AverageOptions chosen,
                    std::shared_ptr<average::OtherMemory> others)
    : user(names_of(parameters)), options(std::move(chosen)), other_memory(std::move(others)) {
  average::check_options(options, other_memory == nullptr);
  average::check_parameters(parameters);
  average::check_devices(parameters, options);
  if (options.replicas == nullptr) {
    parts = std::move(parameters);
  } else {
    parts = divide(parameters);
    undivided = std::move(parameters);
  }
  for (const TensorView& part : parts) {
    elements += part.region.size();
    const auto averaged = static_cast<int64_t>(options.schedules.size());
    bytes_per_update +=
        byte_size(part.dtype, part.region.size()) + 2 * averaged * byte_size(options.dtype, part.region.size());
  }
  pool = std::make_unique<base::ThreadPool>(average::threads_for(elements, options.num_threads));
}

/// Threads for what goes on while the caller does. Beside training on the host one must do; beside training on a device
/// the host is idle.
void Average::Impl::make_background(bool offloads) {
  if (worker_) return;
  if (!options.overlap && !offloads) return;
  const int num_threads =
      offloads ? average::threads_for(elements, options.num_threads) : std::max(options.num_threads, 1);
  background_pool_ = std::make_unique<base::ThreadPool>(num_threads, base::ThreadPool::Threads::kOwn);
  worker_ = std::make_unique<base::Worker>();
}

/// All that can fail is made first; then everything changes at once.
void Average::Impl::bind(std::span<const TensorView> parameters) {
  std::vector<TensorView> divided = divide(parameters), now;
  if (options.replicas != nullptr) now.assign(parameters.begin(), parameters.end());
  Bound made = make_bound(divided);
  read_counts();  // of tables that are about to go
  for (const auto& offload : bound.offloads) offload_bytes_before += offload->bytes();
  undivided.swap(now);
  parts.swap(divided);
  std::swap(bound, made);
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
    if (!same_device(part.device, device)) {
      fail(Code::kUnsupported, "'{}' is on another device than '{}'; give the averages' memory yourself", part.name,
           parts[0].name);
    }
    begins.push_back(bytes);
    bytes += (byte_size(options.dtype, part.region.size()) + kAlignment - 1) / kAlignment * kAlignment;
  }
  const auto count = static_cast<int64_t>(options.schedules.size());
  const int64_t stride =
      device.kind == Device::Kind::kCpu ? average::arena_stride(bytes, static_cast<int>(count)) : bytes;
  memory = kernels::Memory(static_cast<size_t>((count - 1) * stride + bytes), device);
  averages.assign(options.schedules.size(), parts);
  for (size_t k = 0; k < averages.size(); ++k) {
    for (size_t i = 0; i < parts.size(); ++i) {
      averages[k][i].dtype = options.dtype;
      averages[k][i].data = memory.data() + static_cast<int64_t>(k) * stride + begins[i];
    }
  }
}

/// What averages `views`, whose averages are ours. Rings are kept: to pin memory is slow.
Average::Impl::Bound Average::Impl::make_bound(std::span<const TensorView> views) {
  const std::vector<Place> places = places_of(views, averages);
  make_background(std::any_of(places.begin(), places.end(), [](const Place& place) { return place.offloaded; }));
  size_t whole_rings = 0;
  for (const Place& place : places) whole_rings += place.offloaded ? average::whole_ring_bytes(place.parameters) : 0;
  const double share =
      std::min(1.0, static_cast<double>(options.ring_bytes) / static_cast<double>(std::max<size_t>(whole_rings, 1)));
  Bound made;
  for (const Place& place : places) {
    const auto& [device, offloaded, parameters, averaged] = place;
    if (offloaded) {
      std::shared_ptr<average::Ring> ring = ring_of(device.index);
      if (!ring) {
        const auto bytes = static_cast<double>(average::whole_ring_bytes(parameters)) * share;
        ring = std::make_shared<average::Ring>(device.index, static_cast<size_t>(bytes));
      }
      made.offloads.push_back(
          std::make_unique<average::Offload>(device, parameters, averaged, std::move(ring), *background_pool_));
    } else if (device.kind == average::kOther) {
      made.backends.push_back(other_memory->bind(parameters));
    } else {
      made.backends.push_back(
          average::make_backend(device, parameters, averaged, options.overlap ? *background_pool_ : *pool));
    }
    if (!offloaded && options.rounding == Rounding::kStochastic)
      made.backends.back()->prepare_noise();  // else before the first step that draws noise
  }
  return made;
}

std::shared_ptr<average::Ring> Average::Impl::ring_of(int index) const {
  const auto found = std::find_if(bound.offloads.begin(), bound.offloads.end(),
                                  [&](const auto& one) { return one->device().index == index; });
  return found == bound.offloads.end() ? nullptr : (*found)->ring();
}

void Average::Impl::copy_parameters() {
  for (const auto& backend : bound.backends) backend->copy_parameters();
  for (const auto& offload : bound.offloads) offload->copy_parameters();
}

void Average::bind(std::span<const TensorView> parameters) {
  const auto use = impl_->use("bind()");
  average::check_same(impl_->whole(), parameters);
  average::check_devices(parameters, impl_->options);
  impl_->follow_streams(parameters);
  if (same_addresses(impl_->whole(), parameters)) return;
  average::check_apart(parameters, impl_->averages);
  impl_->wait();
  if (impl_->swap)
    fail(Code::kInvalidArgument, "parameters have moved while they hold averages; swap back before they move");
  impl_->bind(parameters);
}

}  // namespace shardow
