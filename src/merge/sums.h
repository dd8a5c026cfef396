// The bytes of a merge: any region of any of its tensors, made from the same region of the inputs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "merge/plan.h"
#include "shardow/group.h"

namespace shardow::merging {

class Sums {
 public:
  /// `plan` outlives it. `verify`: checksums of inputs are compared where they carry them.
  Sums(const Plan& plan, bool verify);
  ~Sums();

  /// Fills `wanted`, in host memory, in its own dtype. For any thread; each holds a block of every operand. `counted`:
  /// these bytes count for the inputs' checksums, and for sums that are too large.
  void read(const TensorView& wanted, bool counted);

  /// Collective. Throws kCorrupt where an input's bytes are not what was saved, among tensors that the ranks together
  /// have read once; of the others `read_once` says no. Throws kInvalidArgument where numbers have become infinite in
  /// the dtype that was wanted. `then` ends the message. The first time only: later reads are not counted.
  void check(Group& group, std::chrono::milliseconds timeout, const std::vector<bool>& read_once,
             std::string_view then = {});

  int64_t bytes_read() const { return bytes_read_; }  ///< by this rank

 private:
  struct Scratch;

  std::unique_ptr<Scratch> take();
  void give_back(std::unique_ptr<Scratch> scratch);
  void add(std::span<const size_t> inputs, size_t tensor, const TensorView& block, bool counted, Scratch& scratch,
           double* sums, bool scaled);
  uint64_t count_overflown(std::span<const size_t> inputs, size_t tensor, const TensorView& block, Scratch& scratch,
                           std::span<const double> sums);
  void read_input(size_t input, size_t tensor, const TensorView& block, bool counted);
  void check_bytes(const std::vector<bool>& read_once, std::string_view then) const;
  void check_sizes(std::string_view then) const;
  size_t place(size_t input, size_t tensor) const { return input * plan_.tensors().size() + tensor; }

  const Plan& plan_;
  bool verify_;
  std::vector<uint64_t> crcs_;       // by place(): what this rank has read; changed through std::atomic_ref
  std::vector<uint64_t> too_large_;  // by tensor, how many; changed likewise
  std::atomic<bool> checked_ = false;
  std::atomic<int64_t> bytes_read_ = 0;
  base::Mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> spare_ SHARDOW_GUARDED_BY(mutex_);
};

}  // namespace shardow::merging
