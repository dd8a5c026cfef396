// Copies between a region's memory, where elements lie one after another, and a tensor of the whole shape with any strides.
//
//   std::vector<float> matrix(128 * 512), rows(64 * 512);  // (128, 512), column by column; its upper half, row by row
//   const TensorView upper{"weight", DType::kF32, Region::whole({128, 512}).part(0, 2), rows.data()};
//   take({matrix.data(), DType::kF32, {1, 128}}, upper);
//   place(upper, {matrix.data(), DType::kF32, {1, 128}});  // after a swap or a load
#pragma once

#include <cstdint>

#include "shardow/region.h"
#include "shardow/tensor_view.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Host memory: element (i, j, ...) lies i strides[0] + j strides[1] + ... elements from `data`.
struct StridedView {
  void* data;
  DType dtype;
  Shape strides;  ///< in elements; any sign, 0 where elements share memory
};

/// part = tensor[part.region]. Memories must not overlap. Throws kUnsupported for device memory and elements below 8 bits.
void take(const StridedView& tensor, const TensorView& part);

/// tensor[part.region] = part; not for strides of 0.
void place(const TensorView& part, const StridedView& tensor);

}  // namespace shardow
#pragma GCC visibility pop
