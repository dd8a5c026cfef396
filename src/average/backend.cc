// The only file of the layer that tells devices apart. A table below a million elements is done before a second thread would have woken.
#include "average/backend.h"

#include <cstdlib>
#include <new>
#include <utility>

#include "average/plan.h"
#include "base/errors.h"
#include "base/threads.h"
#include "kernels/cuda.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

using kernels::Chunk;
using kernels::Step;
using kernels::Tally;

constexpr int64_t kSerialElements = 1 << 20;
constexpr size_t kAlignment = 64;

/// A table with its shares, one per thread.
struct Shares {
  Shares(std::vector<Chunk> table, int parts)
      : chunks(std::move(table)), bounds(partition(chunks, parts)), tallies(static_cast<size_t>(parts)) {}

  std::vector<Chunk> chunks;
  std::vector<size_t> bounds;
  std::vector<Tally> tallies;  // kept, so that an update allocates nothing
};

int threads_for(const std::vector<Chunk>& chunks, int num_threads) {
  int64_t elements = 0;
  for (const Chunk& chunk : chunks) elements += chunk.count;
  if (elements < kSerialElements) return 1;
  return num_threads > 0 ? num_threads : base::allowed_threads();
}

void add(NonFiniteCount& total, const Tally& tally, std::span<const Chunk> chunks) {
  total.elements += tally.non_finite;
  if (total.first == nullptr && tally.first_chunk >= 0) total.first = chunks[static_cast<size_t>(tally.first_chunk)].parameter;
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(Chunks chunks, int num_threads)
      : threads_(threads_for(chunks.memory, num_threads)),
        memory_(std::move(chunks.memory), threads_),
        runs_(std::move(chunks.runs), threads_),
        pool_(threads_) {}

  NonFiniteCount update(const Step& step, bool by_runs) override {
    Shares& shares = by_runs && !runs_.chunks.empty() ? runs_ : memory_;
    const std::span<const Chunk> all(shares.chunks);
    pool_.run([&](int i) {
      const size_t begin = shares.bounds[static_cast<size_t>(i)], end = shares.bounds[static_cast<size_t>(i) + 1];
      shares.tallies[static_cast<size_t>(i)] = kernels::cpu::update(all.subspan(begin, end - begin), step);
    });
    return sum(shares);
  }

  NonFiniteCount read_count() override { return {}; }

 private:
  static NonFiniteCount sum(const Shares& shares) {
    NonFiniteCount total;
    for (size_t i = 0; i < shares.tallies.size(); ++i) add(total, shares.tallies[i], std::span(shares.chunks).subspan(shares.bounds[i]));
    return total;
  }

  int threads_;
  Shares memory_, runs_;
  base::ThreadPool pool_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(Chunks chunks, Device device)
      : chunks_(std::move(chunks)),
        memory_(kernels::cuda::upload(chunks_.memory, device)),
        runs_(chunks_.runs.empty() ? nullptr : kernels::cuda::upload(chunks_.runs, device)) {}

  NonFiniteCount update(const Step& step, bool by_runs) override {
    (by_runs && runs_ ? runs_ : memory_)->update(step);
    return {};
  }

  NonFiniteCount read_count() override {
    NonFiniteCount total;
    add(total, memory_->read_tally(), chunks_.memory);
    if (runs_) add(total, runs_->read_tally(), chunks_.runs);
    return total;
  }

 private:
  Chunks chunks_;  // as uploaded: a tally names a chunk by its index
  std::unique_ptr<kernels::cuda::Table> memory_, runs_;
};

bool on_cuda(const Device& device) {
  return device.kind == Device::Kind::kCuda;
}

}  // namespace

std::unique_ptr<Backend> make_backend(Device device, Chunks chunks, int num_threads) {
  if (on_cuda(device)) return std::make_unique<CudaBackend>(std::move(chunks), device);
  return std::make_unique<CpuBackend>(std::move(chunks), num_threads);
}

void cast(const TensorView& from, const TensorView& to) {
  const int64_t count = from.region.size();
  if (on_cuda(from.device)) {
    kernels::cuda::cast(from.data, from.dtype, to.data, to.dtype, count, from.device);
  } else {
    kernels::cpu::cast(from.data, from.dtype, to.data, to.dtype, count);
  }
}

void swap(const TensorView& parameter, const TensorView& average, kernels::Direction direction) {
  const int64_t count = parameter.region.size();
  if (on_cuda(parameter.device)) {
    kernels::cuda::swap(parameter.data, parameter.dtype, average.data, average.dtype, count, direction, parameter.device);
  } else {
    kernels::cpu::swap(parameter.data, parameter.dtype, average.data, average.dtype, count, direction);
  }
}

Memory::Memory(size_t bytes, Device device) : bytes_(bytes), device_(device) {
  if (bytes == 0) return;
  if (on_cuda(device)) {
    data_ = static_cast<std::byte*>(kernels::cuda::allocate(bytes, device.index));
  } else {
    data_ = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kAlignment}));
  }
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), device_(other.device_) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  return *this;
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  if (on_cuda(device_)) {
    kernels::cuda::release(data_, device_.index);
  } else {
    ::operator delete (data_, std::align_val_t{kAlignment});
  }
}

}  // namespace shardow::average
