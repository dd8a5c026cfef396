// Copying between a region's memory, where its elements lie one after another, and a tensor of the whole shape, which lies as it likes.
//
//   std::vector<float> matrix(128 * 512), rows(64 * 512);  // (128, 512), column by column; its upper half, row by row
//   const TensorView upper{"weight", DType::kF32, Region::whole({128, 512}).part(0, 2), rows.data()};
//   take({matrix.data(), DType::kF32, {1, 128}}, upper);   // and place(upper, ...) back after a swap or a load
//
// What is averaged, saved and loaded lies in a region's order. A part of a full tensor, or weights with other strides than row-major ones
// (channels_last, a transposed matrix), are taken out of their tensor first and placed back after. For a shard with strides the whole is
// the local tensor: Region::whole(region.grid_shape()). Host memory alone.
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
/// Throws kInvalidArgument where dtypes or numbers of dimensions differ, kUnsupported for memory of a device and elements below 8 bits;
/// nothing has been written then. The memories must not overlap.
void take(const StridedView& tensor, const TensorView& part);

/// tensor[part.region] = part, and the rest of `tensor` stays. Throws as take(), and kInvalidArgument where elements of `tensor` share
/// memory by a stride of 0.
void place(const TensorView& part, const StridedView& tensor);

}  // namespace shardow
#pragma GCC visibility pop
