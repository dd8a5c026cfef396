// The memory that an Average works on: the parameters' parts on this rank, the averages, and a backend for each device. Everything that
// could fail or allocate happens here, before an update.
#include <algorithm>

#include "average/arena.h"
#include "average/checks.h"
#include "average/impl.h"
#include "average/replicas.h"
#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow {

using base::fail;

namespace {

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
  average::check_devices(parameters, options);
  whole.assign(parameters.begin(), parameters.end());
  parts = divide(whole);
  for (const TensorView& part : parts) {
    elements += part.region.size();
    const auto averaged = static_cast<int64_t>(options.schedules.size());
    bytes_per_update += byte_size(part.dtype, part.region.size()) + 2 * averaged * byte_size(options.dtype, part.region.size());
  }
  pool = std::make_unique<base::ThreadPool>(average::threads_for(elements, options.num_threads));
  if (!options.overlap) return;
  background_pool_ = std::make_unique<base::ThreadPool>(std::max(options.num_threads, 1), base::ThreadPool::Threads::kOwn);
  worker_ = std::make_unique<base::Worker>();
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
  memory = kernels::Memory(static_cast<size_t>((count - 1) * stride + bytes), device);
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
    made.push_back(average::make_backend(device, here, averaged, background_pool_ ? *background_pool_ : *pool));
    if (options.rounding == Rounding::kStochastic) made.back()->prepare_noise();  // else before the first step that draws noise
  }
  return made;
}

void Average::Impl::copy_parameters() {
  for (const auto& backend : backends) backend->copy_parameters();
}

void Average::bind(std::span<const TensorView> parameters) {
  average::check_same(impl_->whole, parameters);
  average::check_devices(parameters, impl_->options);
  impl_->follow_streams(parameters);
  if (same_addresses(impl_->whole, parameters)) return;
  impl_->wait();
  if (impl_->swap) fail(Code::kInvalidArgument, "parameters have moved while they hold averages; swap back before they move");
  impl_->bind(parameters);
}

}  // namespace shardow
