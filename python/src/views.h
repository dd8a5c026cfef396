// Views that stay on the engine's side.
#pragma once

#include <vector>

#include "shardow/tensor_view.h"

namespace shardow::python {

struct Views {
  std::vector<TensorView> all;
};

}  // namespace shardow::python
