#include "average/offload.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "average/chunk_table.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

using kernels::Chunk;

constexpr int64_t kLeastChunkElements = 16;

size_t round_up(size_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

size_t bytes_of(const Chunk& chunk) {
  return static_cast<size_t>(byte_size(chunk.parameter_dtype, chunk.count));
}

/// Returns a power of two, such that any chunk fits a slot.
int64_t chunk_elements_for(size_t slot_bytes) {
  constexpr size_t kLargest = 8;  // bytes of an element
  return std::clamp(static_cast<int64_t>(std::bit_floor(slot_bytes / kLargest)), kLeastChunkElements, kChunkElements);
}

}  // namespace

size_t whole_ring_bytes(std::span<const TensorView> parameters) {
  size_t bytes = 0;
  for (const TensorView& view : parameters)
    bytes += round_up(static_cast<size_t>(byte_size(view.dtype, view.region.size())));
  return bytes;
}

/// Assigns chunks to slots of `slot_bytes`, and lays out the copies that fill them: a single copy for neighbours in the
/// same allocation of the device's memory. Returns the first chunk of each block.
std::vector<size_t> Offload::lay_out(std::span<Chunk> chunks, size_t slot_bytes) {
  std::vector<size_t> chunk_begins;
  size_t used = slot_bytes;  // of the block's slot; full, so that the first chunk begins a block
  size_t rest = 0;           // of the allocation that the last copy is from
  for (size_t c = 0; c < chunks.size(); ++c) {
    const auto* const from = static_cast<const std::byte*>(chunks[c].parameter);
    const size_t bytes = bytes_of(chunks[c]);
    const bool aligned = used % static_cast<size_t>(byte_size(chunks[c].parameter_dtype, 1)) == 0;
    const bool follows = c > 0 && aligned && from == copies_.back().from + copies_.back().bytes && bytes <= rest;
    size_t at = follows ? used : round_up(used);
    const bool begins = at + bytes > slot_bytes;
    if (begins) {
      at = 0;
      chunk_begins.push_back(c);
      blocks_.push_back({copies_.size(), copies_.size()});
    }
    std::byte* const to = ring_->slot(blocks_.size() - 1) + at;
    if (!follows) rest = kernels::cuda::rest_of_allocation(from, device_.index);
    if (begins || !follows) copies_.push_back({from, to, 0});
    rest -= std::min(rest, bytes);
    copies_.back().bytes += bytes;
    chunks[c].parameter = to;
    used = at + bytes;
    blocks_.back().end = copies_.size();
  }
  return chunk_begins;
}

Offload::Offload(Device device, std::span<const TensorView> parameters,
                 std::span<const std::vector<TensorView>> averages, std::shared_ptr<Ring> ring, base::ThreadPool& pool)
    : device_(device), ring_(std::move(ring)) {
  const int64_t chunk_elements = chunk_elements_for(ring_->slot_bytes());
  std::vector<Chunk> chunks = make_chunks(parameters, averages, chunk_elements);
  const bool fits = whole_ring_bytes(parameters) <= ring_->bytes();
  const std::vector<size_t> begins = lay_out(chunks, fits ? ring_->bytes() : ring_->slot_bytes());
  table_ = std::make_unique<HostTable>(std::move(chunks), RunCutter(parameters, chunk_elements), averages.size(), pool,
                                       begins);
  fetched_ = averaged_ = blocks_.size();
}

void Offload::begin() {
  ring_->follow(device_.stream);
  fetched_ = averaged_ = 0;
}

void Offload::fetch() {
  while (!fetched() && fetched_ < averaged_ + ring_->num_slots()) {
    for (size_t i = blocks_[fetched_].first; i < blocks_[fetched_].end; ++i) {
      ring_->copy(copies_[i].to, copies_[i].from, copies_[i].bytes);
      bytes_ += static_cast<int64_t>(copies_[i].bytes);
    }
    ring_->mark(fetched_);
    ++fetched_;
  }
}

void Offload::arrive() {
  for (size_t b = averaged_; b < fetched_; ++b) ring_->wait(b);
}

NonFiniteCount Offload::next(const kernels::Step& step, bool by_runs) {
  ring_->wait(averaged_);
  const NonFiniteCount met = table_->update(averaged_, step, by_runs);
  ++averaged_;
  return met;
}

void Offload::stop() noexcept {
  ring_->drain();
  fetched_ = averaged_;
}

void Offload::release_weights() {
  if (!blocks_.empty()) ring_->hold(device_.stream, blocks_.size() - 1);
}

void Offload::copy_parameters() {
  const int64_t bytes = bytes_;
  begin();
  try {
    for (; !done(); ++averaged_) {
      fetch();
      ring_->wait(averaged_);
      table_->copy_parameters(averaged_);
    }
  } catch (...) {
    stop();
    bytes_ = bytes;
    throw;
  }
  bytes_ = bytes;
}

void Offload::set_stream(int index, void* stream) {
  if (index != device_.index || stream == device_.stream) return;
  ring_->join(stream, device_.stream);
  device_.stream = stream;
}

bool Offload::capturing() const {
  return kernels::cuda::capturing(device_);
}

int64_t Offload::table_bytes() const noexcept {
  return table_->bytes() + static_cast<int64_t>(copies_.capacity() * sizeof(Copy) + blocks_.capacity() * sizeof(Block));
}

}  // namespace shardow::average
