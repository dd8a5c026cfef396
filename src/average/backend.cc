// The only file of the layer that distinguishes devices. One thread is done with a table below a million elements
// before a second one would have woken.
#include "average/backend.h"

#include <algorithm>
#include <utility>

#include "average/chunk_table.h"
#include "base/errors.h"
#include "kernels/cuda.h"
#include "tensor/dtype.h"

namespace shardow::average {
namespace {

using kernels::Chunk;
using kernels::Step;

constexpr int64_t kSerialElements = 1 << 20;

class CpuBackend final : public Backend {
 public:
  CpuBackend(std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages,
             base::ThreadPool& pool)
      : table_(make_chunks(parameters, averages), RunCutter(parameters), averages.size(), pool, {{0}}) {}

  NonFiniteCount update(const Step& step, bool by_runs) override { return table_.update(0, step, by_runs); }
  void copy_parameters() override { table_.copy_parameters(0); }
  int64_t table_bytes() const noexcept override { return table_.bytes(); }

 private:
  HostTable table_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(Device device, std::span<const TensorView> parameters, std::span<const std::vector<TensorView>> averages)
      : device_(device),
        num_averages_(static_cast<int>(averages.size())),
        chunks_(make_chunks(parameters, averages)),
        cutter_(parameters),
        memory_(kernels::cuda::upload(chunks_, device)) {}

  void prepare_noise() override {
    if (runs_ || !cutter_.cuts()) return;
    std::vector<Chunk> pieces = make_runs(cutter_, chunks_);
    runs_ = kernels::cuda::upload(pieces, device_);
    pieces_ = std::move(pieces);
  }

  NonFiniteCount update(const Step& step, bool by_runs) override {
    (by_runs && runs_ ? runs_ : memory_)->update(step);
    return {};
  }

  void copy_parameters() override { memory_->copy(num_averages_); }

  NonFiniteCount read_count() override {
    read_.add(memory_->read_tally(), chunks_);
    if (runs_) read_.add(runs_->read_tally(), pieces_);
    return std::exchange(read_, {});
  }

  /// Counts each table twice: the device has a copy.
  int64_t table_bytes() const noexcept override {
    return static_cast<int64_t>(2 * (chunks_.size() + pieces_.size()) * sizeof(Chunk) + cutter_.bytes());
  }

  void set_stream(int index, void* stream) override {
    if (index != device_.index) return;
    memory_->set_stream(stream);
    if (runs_) runs_->set_stream(stream);
    device_.stream = stream;
  }

  bool capturing() const override { return kernels::cuda::capturing(device_); }

  /// Captures both tables: only the replay's step decides which of them it needs, and the other's step then has no
  /// averages. No table can be made here, since a capture allows no allocation.
  void capture(const Step& step) override {
    memory_->update(step);
    if (runs_) runs_->update(step);
    captured_ = true;
    captured_runs_ = runs_ != nullptr;
  }

  void check_prepare(bool by_runs) override {
    if (capturing()) {
      base::fail(Code::kInvalidArgument,
                 "prepare_replay() belongs before a replay, not into the capture on device {}: it would be replayed "
                 "with it",
                 device_.index);
    }
    if (!captured_) {
      base::fail(Code::kInvalidArgument,
                 "no graph has an update() of these weights on device {}, or they have moved since it was captured; "
                 "capture update() anew",
                 device_.index);
    }
    if (by_runs) prepare_noise();
    if (by_runs && runs_ && !captured_runs_) {
      base::fail(Code::kInvalidArgument,
                 "this step rounds stochastically, and the captured graph has no launch for that; capture update() "
                 "anew, now that it can");
    }
  }

  NonFiniteCount prepare(const Step& step, bool by_runs) override {
    const bool runs = by_runs && runs_;
    Step none = step;
    none.num_averages = 0;
    memory_->set_step(runs ? none : step);
    if (runs_) runs_->set_step(runs ? step : none);
    return {};
  }

 private:
  Device device_;
  int num_averages_;
  std::vector<Chunk> chunks_, pieces_;  // as uploaded: a tally names a chunk by its index
  RunCutter cutter_;
  bool captured_ = false, captured_runs_ = false;
  std::unique_ptr<kernels::cuda::Table> memory_, runs_;
  NonFiniteCount read_;  // what one table counted, where reading the other's count failed
};

bool on_cuda(const Device& device) {
  return device.kind == Device::Kind::kCuda;
}

}  // namespace

std::unique_ptr<Backend> make_backend(Device device, std::span<const TensorView> parameters,
                                      std::span<const std::vector<TensorView>> averages, base::ThreadPool& pool) {
  if (on_cuda(device)) return std::make_unique<CudaBackend>(device, parameters, averages);
  return std::make_unique<CpuBackend>(parameters, averages, pool);
}

namespace {

/// Calls fn(begin, count) for parts of `count` elements, on all threads where waking them pays. Cuts keep vectors
/// whole.
template <typename Fn>
void in_parts(int64_t count, base::ThreadPool& pool, const Fn& fn) noexcept {
  if (count < kSerialElements) return fn(0, count);
  const int64_t part = (count / pool.size() + 63) / 64 * 64;
  pool.run([&](int thread) {
    const int64_t begin = std::min(part * thread, count),
                  end = thread + 1 == pool.size() ? count : std::min(begin + part, count);
    fn(begin, end - begin);
  });
}

template <typename Byte>
Byte* at(Byte* data, DType dtype, int64_t element) {
  return data + byte_size(dtype, element);
}

}  // namespace

void cast_on_host(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count,
                  base::ThreadPool& pool) noexcept {
  in_parts(count, pool, [&](int64_t begin, int64_t part) {
    kernels::cpu::cast(at(from, from_dtype, begin), from_dtype, at(to, to_dtype, begin), to_dtype, part);
  });
}

void swap_on_host(std::byte* parameter, DType parameter_dtype, std::byte* average, DType average_dtype, int64_t count,
                  kernels::Direction direction, base::ThreadPool& pool) noexcept {
  in_parts(count, pool, [&](int64_t begin, int64_t part) {
    kernels::cpu::swap(at(parameter, parameter_dtype, begin), parameter_dtype, at(average, average_dtype, begin),
                       average_dtype, part, direction);
  });
}

void cast(const TensorView& from, const TensorView& to, base::ThreadPool& pool) {
  const int64_t count = from.region.size();
  if (on_cuda(from.device)) {
    kernels::cuda::cast(from.data, from.dtype, to.data, to.dtype, count, from.device);
  } else {
    cast_on_host(data_at(from, 0), from.dtype, data_at(to, 0), to.dtype, count, pool);
  }
}

size_t most_swapped(const TensorView& parameter, const TensorView& average) {
  const bool launched =
      on_cuda(parameter.device) && on_cuda(average.device) && kernels::swaps_in_place(parameter.dtype, average.dtype);
  return launched ? kernels::cuda::Pairs::kMost : 1;
}

void swap(std::span<const TensorView> parameters, std::span<const TensorView> averages, kernels::Direction direction,
          base::ThreadPool& pool) {
  if (on_cuda(parameters[0].device)) return kernels::cuda::swap(parameters, averages, direction);
  for (size_t i = 0; i < parameters.size(); ++i) {
    swap_on_host(data_at(parameters[i], 0), parameters[i].dtype, data_at(averages[i], 0), averages[i].dtype,
                 parameters[i].region.size(), direction, pool);
  }
}

void finish(const TensorView& parameter) {
  if (on_cuda(parameter.device)) kernels::cuda::finish(parameter.device);
}

int threads_for(int64_t elements, int num_threads) {
  if (elements < kSerialElements) return 1;
  return num_threads > 0 ? num_threads : base::allowed_threads();
}

}  // namespace shardow::average
