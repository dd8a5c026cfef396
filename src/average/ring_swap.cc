#include "average/ring_swap.h"

#include <algorithm>
#include <utility>

#include "average/backend.h"
#include "tensor/dtype.h"

namespace shardow::average {

using kernels::Direction;

RingSwap::RingSwap(std::shared_ptr<Ring> ring, std::span<const TensorView> weights, size_t first, size_t end)
    : ring_(std::move(ring)), first_(first) {
  size_t used = ring_->slot_bytes();  // of the block's slot; full, so that the first piece begins a block
  for (size_t view = first; view < end; ++view) {
    const int64_t size = weights[view].region.size();
    const auto itemsize = static_cast<size_t>(byte_size(weights[view].dtype, 1));
    for (int64_t begin = 0; begin < size;) {
      used = (used + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
      if (used >= ring_->slot_bytes()) {
        blocks_.push_back({pieces_.size(), pieces_.size()});
        used = 0;
      }
      const int64_t count = std::min(size - begin, static_cast<int64_t>((ring_->slot_bytes() - used) / itemsize));
      pieces_.push_back({view, begin, count, used});
      blocks_.back().end = pieces_.size();
      used += static_cast<size_t>(count) * itemsize;
      begin += count;
    }
  }
}

/// A pass through the blocks, in one direction.
class RingSwap::Pass {
 public:
  Pass(const RingSwap& swap, const Tensors& tensors, base::ThreadPool& pool)
      : swap_(swap), tensors_(tensors), pool_(pool) {
    if (!swap_.blocks_.empty()) swap_.ring_->follow(tensors.weights[swap_.first_].device.stream);
  }

  /// Copies the device's memory to the slot. On the way back, averages that were only copied there are not fetched.
  void fetch(size_t block, Direction direction) {
    each_piece(block, [&](const Piece& piece, std::byte* slot) {
      if (direction == Direction::kIn || in_place(piece)) swap_.ring_->copy(slot, weight(piece), bytes(piece));
    });
    swap_.ring_->mark(block);
  }

  void write(size_t block) {
    each_piece(block,
               [&](const Piece& piece, std::byte* slot) { swap_.ring_->copy(weight(piece), slot, bytes(piece)); });
    swap_.ring_->mark(block);
  }

  /// Waits for the copies that fetch() or write() began last for the block.
  void wait(size_t block) {
    swap_.ring_->wait(block);
    if (swap_seam != nullptr) swap_seam();
  }

  /// Puts averages into the slot with kIn. With kOut it puts weights there, and all else is as before kIn.
  void exchange(size_t block, Direction direction) noexcept {
    each_piece(block, [&](const Piece& piece, std::byte* slot) {
      const DType own = tensors_.weights[piece.view].dtype, of_average = tensors_.averages[piece.view].dtype;
      std::byte* const average = data_at(tensors_.averages[piece.view], piece.begin);
      if (in_place(piece)) return swap_on_host(slot, own, average, of_average, piece.count, direction, pool_);
      std::byte* const kept = tensors_.kept[piece.view].data() + byte_size(own, piece.begin);
      if (direction == Direction::kOut) return cast_on_host(kept, own, slot, own, piece.count, pool_);
      cast_on_host(slot, own, kept, own, piece.count, pool_);
      cast_on_host(average, of_average, slot, own, piece.count, pool_);
    });
  }

  /// Waits until all copies have ended, well or not.
  void stop() noexcept { swap_.ring_->drain(); }

 private:
  std::byte* weight(const Piece& piece) const { return data_at(tensors_.weights[piece.view], piece.begin); }
  size_t bytes(const Piece& piece) const {
    return static_cast<size_t>(byte_size(tensors_.weights[piece.view].dtype, piece.count));
  }
  bool in_place(const Piece& piece) const {
    return kernels::swaps_in_place(tensors_.weights[piece.view].dtype, tensors_.averages[piece.view].dtype);
  }

  /// Calls fn(piece, its address in the slot) for each piece of the block.
  template <typename Fn>
  void each_piece(size_t block, const Fn& fn) const {
    for (size_t i = swap_.blocks_[block].first; i < swap_.blocks_[block].end; ++i) {
      fn(swap_.pieces_[i], swap_.ring_->slot(block) + swap_.pieces_[i].at);
    }
  }

  const RingSwap& swap_;
  const Tensors& tensors_;
  base::ThreadPool& pool_;
};

void RingSwap::in(const Tensors& tensors, base::ThreadPool& pool) {
  Pass pass(*this, tensors, pool);
  size_t exchanged = 0;  // blocks, on the host
  try {
    if (!blocks_.empty()) pass.fetch(0, Direction::kIn);
    for (size_t block = 0; block < blocks_.size(); ++block) {
      if (block + 1 < blocks_.size()) pass.fetch(block + 1, Direction::kIn);
      pass.wait(block);
      pass.exchange(block, Direction::kIn);
      exchanged = block + 1;
      if (block > 0) pass.wait(block - 1);
      done_ = block;
      pass.write(block);
    }
    if (!blocks_.empty()) pass.wait(blocks_.size() - 1);
    done_ = blocks_.size();
  } catch (...) {
    pass.stop();
    for (size_t block = exchanged; block-- > done_;) pass.exchange(block, Direction::kOut);
    unwritten_ = exchanged - done_;
    throw;
  }
}

void RingSwap::out(const Tensors& tensors, base::ThreadPool& pool) {
  if (done_ == 0 && unwritten_ == 0) return;  // makes no call to a device that may be lost
  Pass pass(*this, tensors, pool);
  // Blocks from `back` on have weights on the host's side, blocks from `written` on in the device's memory.
  size_t back = done_, written = done_ + unwritten_;
  try {
    for (size_t block = done_; block < done_ + unwritten_; ++block) pass.write(block);
    for (size_t block = done_ + unwritten_; block-- > done_;) {
      pass.wait(block);
      written = block;
    }
    if (done_ > 0) pass.fetch(done_ - 1, Direction::kOut);
    for (size_t block = done_; block-- > 0;) {
      if (block > 0) pass.fetch(block - 1, Direction::kOut);
      pass.wait(block);
      pass.exchange(block, Direction::kOut);
      back = block;
      if (block + 1 < done_) pass.wait(block + 1);
      written = block + 1;
      pass.write(block);
    }
    if (done_ > 0) pass.wait(0);
    written = 0;
  } catch (...) {
    pass.stop();
    done_ = back;
    unwritten_ = written - back;
    throw;
  }
  done_ = unwritten_ = 0;
}

}  // namespace shardow::average
