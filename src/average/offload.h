// Offload: averages on the host of weights on a device. Weights reach them through a ring of pinned memory (ring.h), in
// their own dtype, once for all averages.
//
// The chunk table is cut into blocks that fit a slot of the ring. Block b goes through slot b % num_slots, always to
// the same place, so that a table whose parameters lie in the ring serves every update. Where all of it fits the ring,
// it is one block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "average/host_table.h"
#include "average/ring.h"
#include "shardow/tensor_view.h"

namespace shardow::average {

inline bool is_offloaded(const TensorView& parameter, const TensorView& average) {
  return parameter.device.kind == Device::Kind::kCuda && average.device.kind == Device::Kind::kCpu;
}

/// Returns the bytes of a ring that holds all of `parameters` at once.
size_t whole_ring_bytes(std::span<const TensorView> parameters);

class Offload {
 public:
  /// Plans the copies. `averages[k][i]`, on the host, belongs to `parameters[i]`, on `device`. `pool` does the work,
  /// and outlives this.
  Offload(Device device, std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages,
          std::shared_ptr<Ring> ring, base::ThreadPool& pool);

  // An update: the owner calls begin(); one thread, maybe another, then calls fetch() until fetched(), and next() until
  // done(). A call that throws has changed nothing; stop() then makes the offload ready for fetch() again.
  void begin();   ///< the update reads the weights as they are when the stream has come to this point
  void fetch();   ///< begins copies as long as slots are free
  void arrive();  ///< waits until the copies begun so far have ended
  NonFiniteCount next(const kernels::Step& step,
                      bool by_runs);  ///< averages the next block, when its copies have ended
  void stop() noexcept;               ///< waits until no copy is on its way; blocks not averaged must be fetched again
  bool fits() const noexcept { return blocks_.size() <= 1; }  ///< all weights fit the ring
  bool fetched() const noexcept { return fetched_ == blocks_.size(); }
  bool done() const noexcept { return averaged_ == blocks_.size(); }
  size_t num_blocks() const noexcept { return blocks_.size(); }
  size_t averaged() const noexcept { return averaged_; }  ///< blocks
  int64_t bytes() const noexcept { return bytes_; }       ///< that updates have copied, since the start

  /// Makes later work of the weights' stream wait for the last copy, on the device. Any thread may call it when
  /// fetched().
  void release_weights();

  /// Copies the parameters into every average, converted, rounded to nearest even. If it throws, some may be written.
  void copy_parameters();

  void set_stream(int index,
                  void* stream);  ///< of device `index`: the weights' later work goes to this stream
  bool capturing() const;
  int64_t table_bytes() const noexcept;
  const std::shared_ptr<Ring>& ring() const noexcept { return ring_; }
  const Device& device() const noexcept { return device_; }

 private:
  struct Copy {
    const std::byte* from;
    std::byte* to;
    size_t bytes;
  };
  struct Block {
    size_t first, end;  // copies
  };

  std::vector<size_t> lay_out(std::span<kernels::Chunk> chunks, size_t slot_bytes);

  Device device_;
  std::shared_ptr<Ring> ring_;
  std::vector<Copy> copies_;
  std::vector<Block> blocks_;
  std::unique_ptr<HostTable> table_;   // its parts are the blocks
  size_t fetched_ = 0, averaged_ = 0;  // blocks
  int64_t bytes_ = 0;
};

}  // namespace shardow::average
