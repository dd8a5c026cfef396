// Whether views are those of the last time: asked at every step, and most often they are.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "shardow/tensor_view.h"
#include "tensor/grid.h"

namespace shardow {

/// What views are, in memory that is read from front to end: on thousands of them the lines in which names and regions
/// lie take most of the time, and so only those of the other side are looked for. Streams are not in it.
class Likeness {
 public:
  Likeness() = default;
  explicit Likeness(std::span<const TensorView> views);

  /// True only where all of them are equal one by one, be they the same ones or made anew; false also for regions that
  /// were made otherwise. The views that it was made of, or copies of them, live.
  bool holds(std::span<const TensorView> views) const noexcept;

  bool empty() const noexcept { return rows_.empty(); }
  bool on_host() const noexcept { return on_host_; }  ///< all of them: none has a stream

 private:
  struct Row {
    const void* data;
    const GridKey* made;  // the same key is not looked at
    int64_t window, size;
    size_t name;  // bytes
    int device;
    Device::Kind kind;
    DType dtype;
  };

  std::vector<Row> rows_;
  std::vector<GridKey> keys_;
  std::string names_;  // one after another
  bool on_host_ = true;
};

}  // namespace shardow
