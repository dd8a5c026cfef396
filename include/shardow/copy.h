// Copies between a region's memory and a tensor of its whole shape with any strides.
#pragma once

#include "shardow/tensor_view.h"

#pragma GCC visibility push(default)
namespace shardow {

/// A tensor on the host; `data` is its element (0, 0, ...).
struct StridedView {
  void* data;
  DType dtype;
  Shape strides;  ///< in elements, of any sign
};

/// part = tensor[part.region]; no overlap, no elements below 8 bits.
void take(const StridedView& tensor, const TensorView& part);

/// tensor[part.region] = part; no strides of 0.
void place(const TensorView& part, const StridedView& tensor);

}  // namespace shardow
#pragma GCC visibility pop
