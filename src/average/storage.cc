// Everything that can fail or allocate happens in this file, before an update.
#include "average/storage.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "average/checks.h"
#include "average/chunk_table.h"
#include "average/replicas.h"
#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

using base::fail;

constexpr int64_t kAlignment = 64;
constexpr int64_t kPeriod = int64_t{64} << 20;
constexpr int64_t kCached = int64_t{1} << 20;  // bytes: smaller averages stay in caches, where this was not seen

/// Views that are averaged together: parameters on one device, and where their averages are.
struct Place {
  Device device;
  bool offloaded;
  std::vector<TensorView> parameters = {};
  std::vector<std::vector<TensorView>> averages = {};  // [k], parallel to parameters
};

/// Returns devices first: they refuse a replay before the host, which does its part at once, has changed anything.
std::vector<Place> places_of(std::span<const TensorView> parameters,
                             std::span<const std::vector<TensorView>> averages) {
  std::vector<Place> places;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Device& device = parameters[i].device;
    const bool offloaded = is_offloaded(parameters[i], averages[0][i]);
    auto place = std::find_if(places.begin(), places.end(), [&](const Place& candidate) {
      return same_place(candidate.device, device) && candidate.offloaded == offloaded;
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

}  // namespace

int64_t arena_stride(int64_t bytes, int num_averages) {
  if (num_averages < 2 || bytes < kCached) return bytes;
  const int64_t apart = kPeriod / num_averages / kAlignment * kAlignment;
  return bytes + ((apart - bytes) % kPeriod + kPeriod) % kPeriod;
}

Storage::Storage(std::vector<TensorView> parameters, const AverageOptions& chosen, std::shared_ptr<OtherMemory> others)
    : options(chosen), other(std::move(others)) {
  check_parameters(parameters);
  check_devices(parameters, options);
  parts = divide(parameters);
  if (options.replicas != nullptr) undivided = std::move(parameters);
  const auto averaged = static_cast<int64_t>(options.schedules.size());
  for (const TensorView& part : parts) {
    const int64_t size = part.region.size();
    elements += size;
    bytes_per_update += byte_size(part.dtype, size) + 2 * averaged * byte_size(options.dtype, size);
  }
  pool = std::make_unique<base::ThreadPool>(threads_for(elements, options.num_threads));
}

void Storage::take(std::vector<std::vector<TensorView>> views) {
  check_averages(parts, views, options);
  check_apart(whole(), views);
  averages = std::move(views);
  bound = make_bound(parts);
}

void Storage::bind(std::span<const TensorView> parameters) {
  std::vector<TensorView> divided = divide(parameters), copied;
  if (options.replicas != nullptr) copied.assign(parameters.begin(), parameters.end());
  Bound made = make_bound(divided);
  for (const auto& offload : bound.offloads) offload_bytes_before_ += offload->bytes();
  undivided.swap(copied);
  parts.swap(divided);
  std::swap(bound, made);
}

std::vector<TensorView> Storage::divide(std::span<const TensorView> views) const {
  if (options.replicas == nullptr) return {views.begin(), views.end()};
  return parts_of(views, options.replicas->rank(), options.replicas->size());
}

/// Allocates one arena for all averages of all parameters, each starting at a multiple of 64 bytes.
void Storage::allocate() {
  check_overlap(parts, parts, options);
  const Device device = parts.empty() ? Device{} : parts[0].device;
  std::vector<int64_t> begins;
  int64_t bytes = 0;
  for (const TensorView& part : parts) {
    if (!same_place(part.device, device)) {
      fail(Code::kUnsupported, "'{}' is on another device than '{}'; give the averages' memory yourself", part.name,
           parts[0].name);
    }
    begins.push_back(bytes);
    bytes += (byte_size(options.dtype, part.region.size()) + kAlignment - 1) / kAlignment * kAlignment;
  }
  const auto count = static_cast<int64_t>(options.schedules.size());
  const int64_t stride = device.kind == Device::Kind::kCpu ? arena_stride(bytes, static_cast<int>(count)) : bytes;
  arena = kernels::Memory(static_cast<size_t>((count - 1) * stride + bytes), device);
  std::vector<std::vector<TensorView>> views(options.schedules.size(), parts);
  for (size_t k = 0; k < views.size(); ++k) {
    for (size_t i = 0; i < parts.size(); ++i) {
      views[k][i].dtype = options.dtype;
      views[k][i].data = arena.data() + static_cast<int64_t>(k) * stride + begins[i];
    }
  }
  take(std::move(views));
}

/// Returns the tables that average `views` into `averages`. Keeps rings, since pinning memory is slow. Beside training
/// on the host a background update has one thread, if options don't say more; beside training on a device the host is
/// idle.
Storage::Bound Storage::make_bound(std::span<const TensorView> views) {
  const std::vector<Place> places = places_of(views, averages);
  size_t whole_rings = 0;
  for (const Place& place : places) whole_rings += place.offloaded ? whole_ring_bytes(place.parameters) : 0;
  const double share =
      std::min(1.0, static_cast<double>(options.ring_bytes) / static_cast<double>(std::max<size_t>(whole_rings, 1)));
  const bool offloads = std::any_of(places.begin(), places.end(), [](const Place& place) { return place.offloaded; });
  if (background_pool == nullptr && (options.overlap || offloads)) {
    const int num_threads = offloads ? threads_for(elements, options.num_threads) : std::max(options.num_threads, 1);
    background_pool = std::make_unique<base::ThreadPool>(num_threads, base::ThreadPool::Threads::kOwn);
  }
  Bound made;
  for (const auto& [device, offloaded, parameters, averaged] : places) {
    if (offloaded) {
      std::shared_ptr<Ring> ring = ring_of(device.index);
      if (!ring) {
        const auto bytes = static_cast<double>(whole_ring_bytes(parameters)) * share;
        ring = std::make_shared<Ring>(device.index, static_cast<size_t>(bytes));
      }
      made.offloads.push_back(
          std::make_unique<Offload>(device, parameters, averaged, std::move(ring), *background_pool));
      continue;
    }
    made.backends.push_back(
        device.kind == kOther ? other->bind(parameters)
                              : make_backend(device, parameters, averaged, options.overlap ? *background_pool : *pool));
    if (options.rounding == Rounding::kStochastic)
      made.backends.back()->prepare_noise();  // else before the first step that draws noise
  }
  return made;
}

std::shared_ptr<Ring> Storage::ring_of(int index) const {
  const auto offload = std::find_if(bound.offloads.begin(), bound.offloads.end(),
                                    [&](const auto& candidate) { return candidate->device().index == index; });
  return offload == bound.offloads.end() ? nullptr : (*offload)->ring();
}

void Storage::copy_parameters() {
  for (const auto& backend : bound.backends) backend->copy_parameters();
  for (const auto& offload : bound.offloads) offload->copy_parameters();
}

int64_t Storage::offload_bytes() const noexcept {
  return std::accumulate(bound.offloads.begin(), bound.offloads.end(), offload_bytes_before_,
                         [](int64_t sum, const auto& offload) { return sum + offload->bytes(); });
}

int64_t Storage::table_bytes() const noexcept {
  const auto add = [](int64_t sum, const auto& averager) { return sum + averager->table_bytes(); };
  const int64_t beside = std::accumulate(bound.backends.begin(), bound.backends.end(), int64_t{0}, add);
  return std::accumulate(bound.offloads.begin(), bound.offloads.end(), beside, add);
}

void follow(std::vector<TensorView>& views, int index, void* stream) {
  for (TensorView& view : views) {
    if (view.device.kind == Device::Kind::kCuda && view.device.index == index) view.device.stream = stream;
  }
}

void Storage::set_stream(int index, void* stream) {
  for (const auto& backend : bound.backends) backend->set_stream(index, stream);
  for (const auto& offload : bound.offloads) offload->set_stream(index, stream);
  follow(undivided, index, stream);
  follow(parts, index, stream);
  for (std::vector<TensorView>& average : averages) follow(average, index, stream);
}

bool Storage::capturing() const {
  const auto captures = [](const auto& averager) { return averager->capturing(); };
  return std::any_of(bound.backends.begin(), bound.backends.end(), captures) ||
         std::any_of(bound.offloads.begin(), bound.offloads.end(), captures);
}

}  // namespace shardow::average
