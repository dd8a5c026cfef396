// A run is a stretch of the row-major numbering of the tensor's shape. Dimensions whose strides are those of one longer
// dimension are joined first: a contiguous tensor then has one dimension, and every run is one copy. Along what is left
// a run goes row by row of the last one.
#include "shardow/copy.h"

#include <algorithm>
#include <cstring>

#include "base/errors.h"
#include "tensor/dtype.h"

namespace shardow {
namespace {

using base::fail;

/// The joined dimensions of a tensor, at least one, the last one innermost; strides in bytes.
struct Joined {
  std::vector<int64_t> sizes{1}, strides{0};

  Joined(const Shape& shape, const Shape& by, int64_t itemsize) {
    for (size_t d = 0; d < shape.size(); ++d) {
      const int64_t stride = by[d] * itemsize;
      if (shape[d] == 1) continue;
      if (sizes.back() == 1) {
        sizes.back() = shape[d];
      } else if (strides.back() == stride * shape[d]) {
        sizes.back() *= shape[d];
      } else {
        sizes.push_back(shape[d]);
        strides.push_back(0);
      }
      strides.back() = stride;
    }
  }
};

template <size_t kBytes>
void copy_each(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t count) {
  for (; count > 0; --count, from += from_stride, to += to_stride) std::memcpy(to, from, kBytes);
}

void copy_row(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t count,
              int64_t itemsize) {
  if (from_stride == itemsize && to_stride == itemsize) {
    std::memcpy(to, from, static_cast<size_t>(count * itemsize));
    return;
  }
  switch (itemsize) {
    case 1: return copy_each<1>(from, from_stride, to, to_stride, count);
    case 2: return copy_each<2>(from, from_stride, to, to_stride, count);
    case 4: return copy_each<4>(from, from_stride, to, to_stride, count);
    default: return copy_each<8>(from, from_stride, to, to_stride, count);
  }
}

/// Calls fn(byte in the tensor, element of local memory, elements) for each row of each run.
template <typename Fn>
void for_each_row(const Region& region, const Joined& tensor, Fn&& fn) {
  const size_t last = tensor.sizes.size() - 1;
  std::vector<int64_t> at(tensor.sizes.size());
  region.for_each_run([&](const Run& run) {
    int64_t byte = 0, rest = run.global_begin;
    for (size_t d = tensor.sizes.size(); d-- > 0; rest /= tensor.sizes[d]) {
      at[d] = rest % tensor.sizes[d];
      byte += at[d] * tensor.strides[d];
    }
    for (int64_t done = 0; done < run.length;) {
      const int64_t count = std::min(run.length - done, tensor.sizes[last] - at[last]);
      fn(byte, run.local_begin + done, count);
      done += count;
      at[last] += count;
      byte += count * tensor.strides[last];
      for (size_t d = last; d > 0 && at[d] == tensor.sizes[d]; --d) {
        byte += tensor.strides[d - 1] - at[d] * tensor.strides[d];
        at[d] = 0;
        ++at[d - 1];
      }
    }
  });
}

/// Bytes of an element that both have. Throws where they can't be copied.
int64_t check(const StridedView& tensor, const TensorView& part) {
  const size_t dims = part.region.shape().size();
  if (tensor.strides.size() != dims)
    fail(Code::kInvalidArgument, "'{}' has {} dimensions and its tensor {} strides", part.name, dims,
         tensor.strides.size());
  if (tensor.dtype != part.dtype)
    fail(Code::kInvalidArgument, "'{}' is {} and its tensor {}", part.name, dtype_name(part.dtype),
         dtype_name(tensor.dtype));
  if (part.device.kind != Device::Kind::kCpu)
    fail(Code::kUnsupported, "'{}' is on a device; only host memory is copied here", part.name);
  if (dtype_bits(part.dtype) < 8)
    fail(Code::kUnsupported, "'{}' is {}, whose elements are no whole bytes", part.name, dtype_name(part.dtype));
  return dtype_bits(part.dtype) / 8;
}

}  // namespace

void take(const StridedView& tensor, const TensorView& part) {
  const int64_t itemsize = check(tensor, part);
  const Joined joined(part.region.shape(), tensor.strides, itemsize);
  const auto* from = static_cast<const std::byte*>(tensor.data);
  auto* to = static_cast<std::byte*>(part.data);
  for_each_row(part.region, joined, [&](int64_t byte, int64_t local, int64_t count) {
    copy_row(from + byte, joined.strides.back(), to + local * itemsize, itemsize, count, itemsize);
  });
}

void place(const TensorView& part, const StridedView& tensor) {
  const int64_t itemsize = check(tensor, part);
  for (size_t d = 0; d < tensor.strides.size(); ++d) {
    if (tensor.strides[d] == 0 && part.region.shape()[d] > 1)
      fail(Code::kInvalidArgument, "'{}' has a stride of 0 in dimension {}: its elements share memory", part.name, d);
  }
  const Joined joined(part.region.shape(), tensor.strides, itemsize);
  const auto* from = static_cast<const std::byte*>(part.data);
  auto* to = static_cast<std::byte*>(tensor.data);
  for_each_row(part.region, joined, [&](int64_t byte, int64_t local, int64_t count) {
    copy_row(from + local * itemsize, itemsize, to + byte, joined.strides.back(), count, itemsize);
  });
}

}  // namespace shardow
