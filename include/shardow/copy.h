// Copying between a region's memory, where its elements lie one after another, and a tensor of the whole shape, which lies as it likes.
//
// What is averaged, saved and loaded lies in a region's order. A part of a full tensor, or weights with other strides than row-major ones
// (channels_last, a transposed matrix), are taken out of their tensor first and placed back after. For the weights of a shard the whole
// shape is that of the local tensor: of Region::whole(region.grid_shape()) or its window.
//
// Host memory alone; on a device the framework that owns the memory does it better.
#pragma once

#include <cstdint>

#include "shardow/region.h"
#include "shardow/tensor_view.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Somebody's tensor in host memory: element (i, j, ...) lies i strides[0] + j strides[1] + ... elements from `data`.
struct StridedView {
  void* data;
  DType dtype;
  Shape strides;  ///< in elements, one of each dimension; any sign, and 0 where elements share memory
};

/// part = tensor[part.region]: part.region.size() elements from part.data on. `tensor` has the shape part.region.shape(), and is only read.
/// Throws kInvalidArgument where dtypes or the number of dimensions differ, kUnsupported for memory of a device and elements below 8 bits;
/// nothing has been written then. The memories must not overlap. Cost O(runs), and O(elements) copies where the last stride is not 1.
void take(const StridedView& tensor, const TensorView& part);

/// tensor[part.region] = part, and the rest of `tensor` stays. Throws as take(), and kInvalidArgument where elements of `tensor` share
/// memory by a stride of 0.
void place(const TensorView& part, const StridedView& tensor);

}  // namespace shardow
#pragma GCC visibility pop
