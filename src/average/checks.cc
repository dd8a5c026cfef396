#include "average/checks.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "average/other_memory.h"
#include "base/errors.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

using base::fail;

constexpr int64_t kLeastRingBytes = 4096;

void check_at_least(const char* name, int64_t value, int64_t least) {
  if (value < least) fail(Code::kInvalidArgument, "{} is {}; it must be at least {}", name, value, least);
}

void check_rounding(const AverageOptions& options, bool of_kernels) {
  const bool narrow = of_kernels && (options.dtype == DType::kBF16 || options.dtype == DType::kF16);
  if (options.rounding == Rounding::kStochastic && options.rule != Rule::kLerp) {
    fail(Code::kInvalidArgument,
         "stochastic rounding is of the lerp rule's increment; use rule lerp, or rounding auto or nearest");
  }
  if (options.rounding == Rounding::kStochastic && options.dtype == DType::kF64) {
    fail(Code::kInvalidArgument,
         "F64 averages do not stall and are never rounded stochastically; use rounding auto or nearest, or dtype F32");
  }
  if (narrow && (options.rounding == Rounding::kNearest || options.rule != Rule::kLerp)) {
    fail(Code::kInvalidArgument,
         "{} averages stand still when rounded to nearest; use dtype F32, or rule lerp with stochastic rounding",
         dtype_name(options.dtype));
  }
}

void check_fits(const TensorView& part, const TensorView& average, DType dtype) {
  if (average.name != part.name)
    fail(Code::kInvalidArgument, "average '{}' stands where '{}' belongs", average.name, part.name);
  if (average.dtype != dtype) {
    fail(Code::kInvalidArgument, "average '{}' is {}, options.dtype is {}", part.name, dtype_name(average.dtype),
         dtype_name(dtype));
  }
  if (!(average.region == part.region)) {
    fail(Code::kInvalidArgument, "average '{}' has region {}, this rank averages {}", part.name,
         average.region.to_string(), part.region.to_string());
  }
  if (average.device.kind != Device::Kind::kCpu && !same_place(average.device, part.device)) {
    fail(Code::kUnsupported,
         "average '{}' is on another device than its parameter; keep both on one, or the average on the host",
         part.name);
  }
}

void check_names(std::span<const TensorView> views) {
  std::unordered_set<std::string_view> names;
  for (const TensorView& view : views) {
    if (!names.insert(view.name).second) fail(Code::kInvalidArgument, "two parameters are named '{}'", view.name);
  }
}

void check_memory(const TensorView& view) {
  if (view.data == nullptr && view.region.size() > 0)
    fail(Code::kInvalidArgument, "'{}' has {} elements and no memory", view.name, view.region.size());
}

void check_shape(std::span<const TensorView> bound, std::span<const TensorView> views) {
  if (views.size() != bound.size())
    fail(Code::kInvalidArgument, "{} parameters; the averages were made for {}", views.size(), bound.size());
  for (size_t i = 0; i < bound.size(); ++i) {
    const TensorView &was = bound[i], &is = views[i];
    if (is.name != was.name)
      fail(Code::kInvalidArgument, "parameter {} is '{}'; the averages were made with '{}' there", i, is.name,
           was.name);
    if (!(is.region == was.region)) {
      fail(Code::kInvalidArgument, "'{}' has region {}; it was {} when the averages were made", is.name,
           is.region.to_string(), was.region.to_string());
    }
    if (!same_place(is.device, was.device))
      fail(Code::kInvalidArgument, "'{}' has moved to another device; make a new Average there", is.name);
    check_memory(is);
  }
}

}  // namespace

bool same_place(const Device& a, const Device& b) {
  return a.kind == b.kind && (a.kind == Device::Kind::kCpu || a.index == b.index);
}

void check_options(const AverageOptions& options, bool of_kernels) {
  if (options.schedules.empty() || options.schedules.size() > kernels::kMaxAverages) {
    fail(Code::kInvalidArgument, "{} schedules; 1 to {} averages are kept in one pass", options.schedules.size(),
         kernels::kMaxAverages);
  }
  if (!kernels::is_averaged_dtype(options.dtype))
    fail(Code::kInvalidArgument, "averages cannot be {}; use F32", dtype_name(options.dtype));
  check_at_least("update_every", options.update_every, 1);
  check_at_least("start_step", options.start_step, 0);
  check_at_least("num_threads", options.num_threads, 0);
  check_at_least("ring_bytes", options.ring_bytes, kLeastRingBytes);
  check_rounding(options, of_kernels);
}

void check_parameters(std::span<const TensorView> parameters) {
  check_names(parameters);
  for (const TensorView& view : parameters) {
    if (!kernels::is_averaged_dtype(view.dtype)) {
      fail(Code::kInvalidArgument, "'{}' is {}; only F32, BF16, F16 and F64 are averaged, leave it out", view.name,
           dtype_name(view.dtype));
    }
    check_memory(view);
  }
}

void check_devices(std::span<const TensorView> parameters, const AverageOptions& options) {
  const bool replicated = options.replicas != nullptr;
  std::map<int, const TensorView*> first;  // by device
  for (const TensorView& view : parameters) {
    if (view.device.kind == Device::Kind::kCpu) continue;
    if (replicated) {
      fail(Code::kUnsupported,
           "'{}' is on CUDA device {}: AverageOptions.replicas moves host memory alone; divide the regions yourself "
           "(Region::part()), and all-gather the parts with the collectives of your framework",
           view.name, view.device.index);
    }
    if (is_other(view)) continue;
    const TensorView& other = *first.emplace(view.device.index, &view).first->second;
    if (other.device.stream != view.device.stream) {
      fail(Code::kInvalidArgument,
           "'{}' and '{}' on CUDA device {} name different streams; one orders all views of a device", other.name,
           view.name, view.device.index);
    }
  }
}

void check_overlap(std::span<const TensorView> parameters, std::span<const TensorView> averages,
                   const AverageOptions& options) {
  if (!options.overlap) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (averages[i].device.kind == Device::Kind::kCpu) continue;
    fail(
        Code::kUnsupported,
        "'{}' is on a device, and its average with it: AverageOptions.overlap is of updates on the host; a device's go "
        "on by themselves",
        parameters[i].name);
  }
}

void check_averages(std::span<const TensorView> parts, std::span<const std::vector<TensorView>> averages,
                    const AverageOptions& options) {
  if (averages.size() != options.schedules.size()) {
    fail(Code::kInvalidArgument, "{} averages for {} schedules", averages.size(), options.schedules.size());
  }
  for (const std::vector<TensorView>& average : averages) {
    if (average.size() != parts.size())
      fail(Code::kInvalidArgument, "{} averages for {} parameters", average.size(), parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      check_fits(parts[i], average[i], options.dtype);
      check_memory(average[i]);
      if (average[i].device.kind == averages[0][i].device.kind) continue;
      fail(Code::kUnsupported,
           "of '{}' one average is on the host and another one on its device; keep all in one place", parts[i].name);
    }
  }
  check_overlap(parts, averages[0], options);
}

void check_apart(std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages) {
  struct Memory {
    const std::byte *begin, *end;
    const std::string* name;
    size_t average;  // 0: the parameter
  };
  std::vector<Memory> all;
  all.reserve(parameters.size() * (averages.size() + 1));
  const auto add = [&](std::span<const TensorView> views, size_t average) {
    for (const TensorView& view : views) {
      const auto* begin = static_cast<const std::byte*>(view.data);
      if (view.region.size() > 0)
        all.push_back({begin, begin + byte_size(view.dtype, view.region.size()), &view.name, average});
    }
  };
  add(parameters, 0);
  for (size_t k = 0; k < averages.size(); ++k) add(averages[k], k + 1);
  const auto comes_first = [](const Memory& a, const Memory& b) { return std::less<>()(a.begin, b.begin); };
  if (!std::is_sorted(all.begin(), all.end(), comes_first)) std::sort(all.begin(), all.end(), comes_first);
  for (size_t i = 1; i < all.size(); ++i) {
    const Memory &first = all[i - 1], &second = all[i];
    if (!std::less<>()(second.begin, first.end)) continue;
    const auto text_of = [](const Memory& memory) {
      return memory.average == 0 ? fmt::format("'{}'", *memory.name)
                                 : fmt::format("average {} of '{}'", memory.average - 1, *memory.name);
    };
    fail(Code::kInvalidArgument,
         "{} and {} share memory: {} bytes of the one lie in the other. Give each its own; of weights that are tied, "
         "average one and let the others follow it",
         text_of(first), text_of(second), std::min(first.end, second.end) - second.begin);
  }
}

void check_same(std::span<const TensorView> bound, std::span<const TensorView> views) {
  check_shape(bound, views);
  check_dtypes(bound, views, "made");
}

void check_dtypes(std::span<const TensorView> bound, std::span<const TensorView> views, std::string_view done) {
  for (size_t i = 0; i < bound.size(); ++i) {
    if (views[i].dtype == bound[i].dtype) continue;
    fail(Code::kInvalidArgument, "'{}' is {}; it was {} when the averages were {}", views[i].name,
         dtype_name(views[i].dtype), dtype_name(bound[i].dtype), done);
  }
}

void check_swappable(std::span<const TensorView> bound, std::span<const TensorView> weights) {
  check_shape(bound, weights);
  check_parameters(weights);
  check_apart(weights);
}

}  // namespace shardow::average
